"""Bounds for the runs of a report: what any rule could have hit in their memory, one request after the other.

A block cache hits by its format's own rule, a whole prompt for instance: there is no bound for it.
"""

from collections.abc import Sequence
from dataclasses import replace

from marconi.replay.most_hit import Limit, most_hit_tokens
from marconi.replay.parallel import run_all
from marconi.replay.result import PolicyResult
from marconi.replay.reuse import Reuse
from marconi.replay.task import Mode, ReplayInputs, Task


def bounded(inputs: ReplayInputs, runs: Sequence[PolicyResult], num_processes: int) -> tuple[PolicyResult, ...]:
    """`runs` of `inputs` with their bounds; several amounts of memory at once where there are processes."""
    reuse, is_bounded = Reuse.of(inputs.trace), inputs.mode is Mode.SERIAL
    limits = [limits_of(inputs, run.task) if is_bounded and run.final_cache_blocks is None else () for run in runs]
    different = tuple(dict.fromkeys(limits))
    found = run_all(_most_hit_tokens, reuse, different, num_processes, lambda _: None)
    most = dict(zip(different, found, strict=True))
    return tuple(
        replace(run, num_new_tokens=reuse.num_new_tokens, most_hit_tokens=most[limit])
        for run, limit in zip(runs, limits, strict=True)
    )


def limits_of(inputs: ReplayInputs, task: Task) -> tuple[Limit, ...]:
    """The memory of `task`; what is on or behind the host counts as in one pool, which no tier outdoes."""
    model = inputs.model
    kv_bytes = model.kv_bytes_per_token
    state_bytes = model.int8_state_bytes if task.int8_checkpoints else model.checkpoint_bytes
    ratio = task.mamba_ratio
    if ratio is None or task.host_bytes:
        storage_bytes = 0 if task.storage is None else task.storage.memory_bytes
        return (Limit(task.memory_bytes + task.host_bytes + storage_bytes, kv_bytes, state_bytes),)
    for_states = task.memory_bytes * (ratio / (1 + ratio))
    return Limit(task.memory_bytes - for_states, kv_bytes, 0), Limit(for_states, 0, state_bytes)


def _most_hit_tokens(reuse: Reuse, limits: tuple[Limit, ...], _progress: object) -> int | None:
    return most_hit_tokens(reuse, limits) if limits else None
