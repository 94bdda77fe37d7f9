"""Bounds for the runs of a report: what any rule could have hit in their memory, one request after the other.

A block cache hits by its format's own rule, a whole prompt for instance: there is no bound for it.
"""

from collections.abc import Iterable

from marconi.replay.most_hit import Limit, most_hit_tokens
from marconi.replay.parallel import run_all
from marconi.replay.result import Bounds, Layout, PolicyResult
from marconi.replay.reuse import Reuse
from marconi.replay.task import Mode, ReplayInputs


def bounds_of(inputs: ReplayInputs, runs: Iterable[PolicyResult], num_processes: int) -> Bounds:
    """Bounds for `runs` of `inputs`; several amounts of memory at once where there are processes."""
    reuse, is_bounded = Reuse.of(inputs.trace), inputs.mode is Mode.SERIAL
    layouts = dict.fromkeys(run.layout for run in runs if is_bounded and run.final_cache_blocks is None)
    found = run_all(_most_hit_tokens, (inputs, reuse), tuple(layouts), num_processes, lambda _: None)
    return Bounds(reuse.num_new_tokens, dict(zip(layouts, found, strict=True)))


def limits_of(inputs: ReplayInputs, layout: Layout) -> tuple[Limit, ...]:
    """The memory of `layout`; what is on or behind the host counts as in one pool, which no tier outdoes."""
    model = inputs.model
    kv_bytes = model.kv_bytes_per_token
    state_bytes = model.int8_state_bytes if layout.int8_checkpoints else model.checkpoint_bytes
    ratio = layout.mamba_ratio
    if ratio is None or layout.host_bytes:
        num_bytes = layout.memory_bytes + layout.host_bytes + layout.storage_bytes
        return (Limit(num_bytes, kv_bytes, state_bytes),)
    for_states = layout.memory_bytes * (ratio / (1 + ratio))
    return Limit(layout.memory_bytes - for_states, kv_bytes, 0), Limit(for_states, 0, state_bytes)


def _most_hit_tokens(shared: tuple[ReplayInputs, Reuse], layout: Layout, _progress: object) -> int:
    inputs, reuse = shared
    return most_hit_tokens(reuse, limits_of(inputs, layout))
