"""Frames of a serial replay, at requests that are evenly spaced: the server's own classes, watched by a recorder."""

from collections.abc import Iterator

from marconi.lifecycle.pools import Amount
from marconi.policy.base import Costs
from marconi.policy.host_tier import HostMemory
from marconi.replay.catalog import build, resolve_policy
from marconi.replay.outcome import PROGRESS_STEP, Progress
from marconi.replay.pools import JointPool, Pool
from marconi.replay.server import ServerReplay
from marconi.replay.task import ReplayInputs, Task
from marconi.view.frame import Frame, PoolFrame
from marconi.view.recorder import Recorder
from marconi.view.snapshot import Columns, NodeKind

_ALL_NODES = 1 << 40


def record(inputs: ReplayInputs, task: Task, num_frames: int, progress: Progress | None = None) -> Iterator[Frame]:
    """Replay the trace of `inputs` serially; yield up to `num_frames` frames, the last after the last request.

    `ValueError` for a policy without a tree.
    """
    policy = resolve_policy(task.policy)
    if policy.caches_blocks or policy.alternatives:
        raise ValueError(f"--policy must be one policy with a tree, got {str(task.policy)!r}")
    config = task.config(inputs)
    cache = build(task.policy, config)
    assert isinstance(cache, ServerReplay)
    host = policy.laid_out(config).host_memory()

    def pools(nodes: Columns) -> list[PoolFrame]:
        on_host = [] if host is None else host_pools_of(host, nodes)
        return [*pools_of(cache.pools, cache.held, inputs.costs), *on_host]

    recorder, requests = Recorder(cache.hybrid, inputs.costs, pools), inputs.trace.requests
    num_frames = min(num_frames, len(requests))
    stops = {len(requests) * (each + 1) // num_frames for each in range(num_frames)}
    for index, request in enumerate(requests, start=1):
        cache.serve(request)
        if index in stops:
            frame = recorder.advance(request.arrival_s, _ALL_NODES)
            assert frame is not None
            yield frame
        if progress is not None and (index % PROGRESS_STEP == 0 or index == len(requests)):
            progress((index - 1) % PROGRESS_STEP + 1)


def pools_of(pools: Pool, held: Amount, costs: Costs) -> list[PoolFrame]:
    """One pool of bytes, or those of KV and of states, of which a cache has `held`."""
    if isinstance(pools, JointPool):
        cached = {"KV": held.num_tokens * costs.kv_bytes_per_token, "states": held.num_states * costs.state_bytes}
        return [PoolFrame("KV and states", "bytes", pools.num_bytes, pools.num_free_bytes, cached)]
    return [
        PoolFrame("KV", "tokens", pools.num_tokens, pools.num_free_tokens, {"KV": held.num_tokens}),
        PoolFrame("states", "slots", pools.num_slots, pools.num_free_slots, {"states": held.num_states}),
    ]


def host_pools_of(memory: HostMemory, nodes: Columns) -> list[PoolFrame]:
    """The pools of a host tier, of which a tree holds what `nodes` say."""
    each = zip(nodes.tokens, nodes.kind, strict=True)
    num_tokens = sum(tokens for tokens, kind in each if kind & NodeKind.HOST_KV)
    num_states = sum(1 for kind in nodes.kind if kind & NodeKind.HOST_STATE)
    return [
        PoolFrame("KV on the host", "tokens", memory.num_tokens, memory.num_tokens - num_tokens, {"KV": num_tokens}),
        PoolFrame(
            "states on the host", "slots", memory.num_slots, memory.num_slots - num_states, {"states": num_states}
        ),
    ]
