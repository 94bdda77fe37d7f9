"""Replays of tasks, in parallel: the runs of a report in its order.

A policy that is the best of several in hindsight is replayed once for each of them; the run with the most hit tokens,
the first among equals, is its run.
"""

from collections.abc import Sequence
from dataclasses import replace

from marconi.replay import queueing, serial
from marconi.replay.catalog import build, require_possible, resolve_policy
from marconi.replay.decode import DecodeLatency
from marconi.replay.outcome import Progress
from marconi.replay.parallel import run_all
from marconi.replay.result import PolicyResult, summarise
from marconi.replay.task import Mode, ReplayInputs, Task


def require_executable(inputs: ReplayInputs, task: Task) -> None:
    """`ValueError`, in which the policy is named, if `execute` would refuse; quick, before anything is replayed."""
    if inputs.mode is Mode.QUEUEING and resolve_policy(task.policy).caches_blocks:
        raise ValueError(f"policy {str(task.policy)!r}: --mode must be serial for a block cache, got queueing")
    if task.int8_checkpoints and not inputs.has_int8_checkpoints:
        raise ValueError(
            f"--int8-checkpoints must be left out for {inputs.model.name}, which keeps no recurrent states alone"
        )
    require_possible(task.policy, task.config(inputs))


def execute(inputs: ReplayInputs, task: Task, progress: Progress | None = None) -> PolicyResult:
    """Replay the trace of `inputs`; `ValueError` for a policy that cannot be made for it."""
    config = task.config(inputs)
    target = build(task.policy, config)
    if inputs.mode is Mode.SERIAL:
        outcome = serial.replay(inputs.trace, target, inputs.latency, progress)
    else:
        speed = queueing.Speed(inputs.latency, DecodeLatency.of(inputs.model, inputs.device))
        outcome = queueing.replay(inputs.trace, target, speed, inputs.batching, progress)
    ratio = resolve_policy(task.policy).laid_out(config).mamba_ratio if inputs.has_states else None
    return summarise(inputs, replace(task, mamba_ratio=ratio), target, outcome)


def choices(task: Task) -> tuple[Task, ...]:
    """The tasks that `task` is the best of: itself, unless its policy has alternatives."""
    return tuple(replace(task, policy=choice) for choice in resolve_policy(task.policy).choices(task.policy))


def num_replays(tasks: Sequence[Task]) -> int:
    """Replays in all."""
    return sum(len(choices(task)) for task in tasks)


def run_tasks(
    inputs: ReplayInputs, tasks: Sequence[Task], num_processes: int, progress: Progress
) -> tuple[PolicyResult, ...]:
    """A run for each task, in order; `ValueError` before the first if one cannot be."""
    (runs,) = run_grids([(inputs, tasks)], num_processes, progress)
    return runs


def run_grids(
    grids: Sequence[tuple[ReplayInputs, Sequence[Task]]], num_processes: int, progress: Progress
) -> list[tuple[PolicyResult, ...]]:
    """A run for each task of each grid on its inputs, as `run_tasks`; no process waits for a grid to end."""
    for inputs, tasks in grids:
        for task in tasks:
            require_executable(inputs, task)
    replays = [(index, choice) for index, (_, tasks) in enumerate(grids) for task in tasks for choice in choices(task)]
    runs = iter(run_all(_execute_in, [inputs for inputs, _ in grids], replays, num_processes, progress))
    return [tuple(_best(task, [next(runs) for _ in choices(task)]) for task in tasks) for _, tasks in grids]


def _execute_in(all_inputs: Sequence[ReplayInputs], replay: tuple[int, Task], progress: Progress) -> PolicyResult:
    index, task = replay
    return execute(all_inputs[index], task, progress)


def _best(task: Task, runs: Sequence[PolicyResult]) -> PolicyResult:
    best = max(runs, key=lambda run: run.num_hit_tokens)
    if best.task.policy == task.policy:
        return best
    return replace(best, task=replace(best.task, policy=task.policy), chosen=str(best.task.policy))
