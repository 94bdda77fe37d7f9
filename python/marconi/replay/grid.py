"""Every policy at every memory: the tasks of a report, and their runs in its order, by memory, then by policy.

A policy that is the best of several in hindsight is replayed once for each of them; the run with the most hit tokens,
the first among equals, is its run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from marconi.baselines.catalog import entry_of
from marconi.policy.catalog import PolicySpec
from marconi.replay.bound import bounds_of
from marconi.replay.outcome import Progress
from marconi.replay.parallel import run_all
from marconi.replay.result import PolicyResult, Report
from marconi.replay.task import Task, World, execute, require_executable


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of a report and the tasks that it is the best of."""

    policy: PolicySpec
    tasks: tuple[Task, ...]

    @classmethod
    def of(cls, task: Task) -> "Cell":
        """The cell of a task, its policy one with alternatives or not; `ValueError` for an unknown policy."""
        choices = entry_of(task.policy).choices(task.policy)
        return cls(task.policy, tuple(replace(task, policy=choice) for choice in choices))


def cells(
    policies: Sequence[PolicySpec], memories_bytes: Sequence[int], mamba_ratio: float | None = None, host_bytes: int = 0
) -> list[Cell]:
    """Every policy at every memory, each with a host tier of `host_bytes` below it unless that is 0."""
    tasks = [Task(policy, num_bytes, mamba_ratio, host_bytes) for num_bytes in memories_bytes for policy in policies]
    return [Cell.of(task) for task in tasks]


def num_replays(grid: Sequence[Cell]) -> int:
    """Tasks in all."""
    return sum(len(cell.tasks) for cell in grid)


def require_all(world: World, grid: Sequence[Cell]) -> None:
    """`ValueError`, in which the policy is named, if one of the cells cannot be replayed."""
    for cell in grid:
        require_executable(world, replace(cell.tasks[0], policy=cell.policy))


def run_cells(world: World, grid: Sequence[Cell], num_processes: int, progress: Progress) -> tuple[PolicyResult, ...]:
    """A run for each cell, in order; `ValueError` before the first if one cannot be."""
    (runs,) = run_grids([(world, grid)], num_processes, progress)
    return runs


def run_grids(
    grids: Sequence[tuple[World, Sequence[Cell]]], num_processes: int, progress: Progress
) -> list[tuple[PolicyResult, ...]]:
    """A run for each cell of each grid in its world, as `run_cells`; no process waits for a grid to end."""
    for world, grid in grids:
        require_all(world, grid)
    tasks = [(index, task) for index, (_, grid) in enumerate(grids) for cell in grid for task in cell.tasks]
    runs = iter(run_all(_execute_in, [world for world, _ in grids], tasks, num_processes, progress))
    return [tuple(_best(cell, [next(runs) for _ in cell.tasks]) for cell in grid) for _, grid in grids]


def _execute_in(worlds: Sequence[World], task: tuple[int, Task], progress: Progress) -> PolicyResult:
    index, of_world = task
    return execute(worlds[index], of_world, progress)


def _best(cell: Cell, runs: Sequence[PolicyResult]) -> PolicyResult:
    best = max(runs, key=lambda run: run.num_hit_tokens)
    return best if best.policy == str(cell.policy) else replace(best, policy=str(cell.policy), chosen=best.policy)


def report_of(world: World, unbounded_bytes: int | None, runs: tuple[PolicyResult, ...], num_processes: int) -> Report:
    """`runs` of `world` as a report, with their bounds."""
    return Report(
        trace=world.trace.name,
        model=world.model.name,
        seed=world.seed,
        mode=world.mode.value,
        device=world.device_name,
        unbounded_bytes=unbounded_bytes,
        bounds=bounds_of(world, runs, num_processes),
        runs=runs,
    )
