"""Every policy at every memory: the tasks of a report, and their runs in its order, by memory, then by policy.

A policy that is the best of several in hindsight is replayed once for each of them; the run with the most hit tokens,
the first among equals, is its run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from marconi.policy.catalog import PolicySpec
from marconi.replay.bound import bounds_of
from marconi.replay.catalog import resolve_policy
from marconi.replay.outcome import Progress
from marconi.replay.parallel import run_all
from marconi.replay.result import PolicyResult, Report
from marconi.replay.store import Storage
from marconi.replay.task import ReplayInputs, Task, execute, require_executable


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of a report and the tasks that it is the best of."""

    policy: PolicySpec
    tasks: tuple[Task, ...]

    @classmethod
    def of(cls, task: Task) -> "Cell":
        """The cell of a task, its policy one with alternatives or not; `ValueError` for an unknown policy."""
        choices = resolve_policy(task.policy).choices(task.policy)
        return cls(task.policy, tuple(replace(task, policy=choice) for choice in choices))


def cells(
    policies: Sequence[PolicySpec],
    memories_bytes: Sequence[int],
    mamba_ratio: float | None = None,
    host_bytes: int = 0,
    *,
    int8_checkpoints: bool = False,
    storage: Storage | None = None,
) -> list[Cell]:
    """Every policy at every memory, each with a host tier of `host_bytes` below it unless that is 0."""
    tasks = [
        Task(policy, num_bytes, mamba_ratio, host_bytes, int8_checkpoints, storage)
        for num_bytes in memories_bytes
        for policy in policies
    ]
    return [Cell.of(task) for task in tasks]


def num_replays(grid: Sequence[Cell]) -> int:
    """Tasks in all."""
    return sum(len(cell.tasks) for cell in grid)


def require_all(inputs: ReplayInputs, grid: Sequence[Cell]) -> None:
    """`ValueError`, in which the policy is named, if one of the cells cannot be replayed."""
    for cell in grid:
        require_executable(inputs, replace(cell.tasks[0], policy=cell.policy))


def run_cells(
    inputs: ReplayInputs, grid: Sequence[Cell], num_processes: int, progress: Progress
) -> tuple[PolicyResult, ...]:
    """A run for each cell, in order; `ValueError` before the first if one cannot be."""
    (runs,) = run_grids([(inputs, grid)], num_processes, progress)
    return runs


def run_grids(
    grids: Sequence[tuple[ReplayInputs, Sequence[Cell]]], num_processes: int, progress: Progress
) -> list[tuple[PolicyResult, ...]]:
    """A run for each cell of each grid on its inputs, as `run_cells`; no process waits for a grid to end."""
    for inputs, grid in grids:
        require_all(inputs, grid)
    tasks = [(index, task) for index, (_, grid) in enumerate(grids) for cell in grid for task in cell.tasks]
    runs = iter(run_all(_execute_in, [inputs for inputs, _ in grids], tasks, num_processes, progress))
    return [tuple(_best(cell, [next(runs) for _ in cell.tasks]) for cell in grid) for _, grid in grids]


def _execute_in(all_inputs: Sequence[ReplayInputs], task: tuple[int, Task], progress: Progress) -> PolicyResult:
    index, of_one = task
    return execute(all_inputs[index], of_one, progress)


def _best(cell: Cell, runs: Sequence[PolicyResult]) -> PolicyResult:
    best = max(runs, key=lambda run: run.num_hit_tokens)
    return best if best.policy == str(cell.policy) else replace(best, policy=str(cell.policy), chosen=best.policy)


def report_of(
    inputs: ReplayInputs, unbounded_bytes: int | None, runs: tuple[PolicyResult, ...], num_processes: int
) -> Report:
    """`runs` of `inputs` as a report, with their bounds."""
    return Report(
        trace=inputs.trace.name,
        model=inputs.model.name,
        seed=inputs.seed,
        mode=inputs.mode.value,
        device=inputs.device_name,
        unbounded_bytes=unbounded_bytes,
        bounds=bounds_of(inputs, runs, num_processes),
        runs=runs,
        remarks=inputs.remarks,
    )
