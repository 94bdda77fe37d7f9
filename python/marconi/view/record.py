"""Frames of a serial replay, at requests that are evenly spaced: the server's own classes, watched by the tree's log.

A tree tells its `memory` of every state that is dropped. A replay has no pools that need to know, so that is where
evictions are seen; the kind of memory that each was for is the one whose count has risen since.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from marconi.baselines.catalog import entry_of
from marconi.policy.base import Costs, Need
from marconi.policy.host_tier import HostMemory
from marconi.policy.hybrid_cache import Counters
from marconi.policy.request import Request
from marconi.replay.outcome import PROGRESS_STEP, Progress
from marconi.replay.policies import build
from marconi.replay.pools import Amount, JointPool, Pool
from marconi.replay.server import ServerReplay
from marconi.replay.task import Task, World
from marconi.tree import Node, RadixTree
from marconi.view.frame import MAX_EVICTED, EvictedState, Frame, PoolFrame
from marconi.view.snapshot import Columns, Kind, PrefixHashes, snapshot

Causes: TypeAlias = Callable[[Request, int], Mapping[str, int]]
"""Says by cause which prompt tokens of a request were computed, given how many were cached."""


def missed(request: Request, num_hit_tokens: int) -> Mapping[str, int]:
    """Name all of them `missed`."""
    return {"missed": request.num_prompt_tokens - num_hit_tokens}


def record(
    world: World, task: Task, num_frames: int, causes: Causes = missed, progress: Progress | None = None
) -> Iterator[Frame]:
    """Replay the world's trace serially; yield up to `num_frames` frames, the last after the last request.

    `ValueError` for a policy without a tree.
    """
    entry = entry_of(task.policy)
    if entry.caches_blocks or entry.alternatives:
        raise ValueError(f"--policy must be one policy with a tree, got {str(task.policy)!r}")
    setting = task.setting(world)
    subject = build(task.policy, setting)
    assert isinstance(subject.cache, ServerReplay)
    recorder = _Recorder(subject.cache, world.costs, causes, setting.laid_out(entry).host_memory())
    requests = world.trace.requests
    num_frames = min(num_frames, len(requests))
    stops = {len(requests) * (each + 1) // num_frames for each in range(num_frames)}
    for index, request in enumerate(requests, start=1):
        recorder.serve(request)
        if index in stops:
            yield recorder.frame(request.arrival_s, index)
        if progress is not None and (index % PROGRESS_STEP == 0 or index == len(requests)):
            progress((index - 1) % PROGRESS_STEP + 1)


class _Recorder:
    """Serves requests, and sums up what has happened since the frame before."""

    def __init__(self, server: ServerReplay, costs: Costs, causes: Causes, host: HostMemory | None) -> None:
        tree = server.hybrid.tree
        self._host = host
        self._server, self._costs, self._causes = server, costs, causes
        self._hashes = PrefixHashes(tree)
        self._watch = tree.memory = _Watch(tree, self._hashes, server.counters)
        self._num_hit_tokens = 0
        self._missed_tokens: dict[str, int] = {}

    def serve(self, request: Request) -> None:
        self._watch.now_s = request.arrival_s
        num_hit_tokens = self._server.serve(request)
        self._num_hit_tokens += num_hit_tokens
        for cause, num_tokens in self._causes(request, num_hit_tokens).items():
            self._missed_tokens[cause] = self._missed_tokens.get(cause, 0) + num_tokens

    def frame(self, time_s: float, num_requests: int) -> Frame:
        """Everything since the frame before."""
        num_evicted, evicted = self._watch.take()
        nodes = snapshot(self._server.hybrid.tree, self._hashes)
        pools = pools_of(self._server.pools, self._server.held, self._costs)
        if self._host is not None:
            pools += host_pools_of(self._host, nodes)
        frame = Frame(
            time_s=round(time_s, 3),
            num_requests=num_requests,
            kv_bytes_per_token=self._costs.kv_bytes_per_token,
            state_bytes=self._costs.state_bytes,
            pools=pools,
            nodes=nodes,
            hit_tokens=self._num_hit_tokens,
            missed_tokens=self._missed_tokens,
            num_evicted=num_evicted,
            evicted=evicted,
        )
        self._num_hit_tokens, self._missed_tokens = 0, {}
        return frame


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
    num_tokens = sum(tokens for tokens, kind in each if kind & Kind.HOST_KV)
    num_states = sum(1 for kind in nodes.kind if kind & Kind.HOST_STATE)
    return [
        PoolFrame("KV on the host", "tokens", memory.num_tokens, memory.num_tokens - num_tokens, {"KV": num_tokens}),
        PoolFrame(
            "states on the host", "slots", memory.num_slots, memory.num_slots - num_states, {"states": num_states}
        ),
    ]


class _Watch:
    """A tree's `Memory` that holds nothing and notes evictions."""

    def __init__(self, tree: RadixTree, hashes: PrefixHashes, counters: Counters) -> None:
        self.now_s = 0.0
        self._tree, self._hashes, self._counters = tree, hashes, counters
        self._latest: deque[EvictedState] = deque(maxlen=MAX_EVICTED)
        self._num_evicted = 0
        self._pending: tuple[int, int, int, float] | None = None
        """Hash, depth, tokens held before, and idle seconds of the one whose need and tokens are not known yet."""
        self._counts = dict(counters.num_evictions)

    def dropped_state(self, node: Node) -> None:
        """Note an eviction: nothing else drops the state of a replay's tree."""
        self._settle()
        idle_s = self.now_s - node.last_hit_s
        self._pending = (self._hashes.of(node), node.depth, self._counters.num_evicted_tokens, idle_s)

    def take(self) -> tuple[int, list[EvictedState]]:
        """How many there were since the last call, and the latest, the last first."""
        self._settle()
        taken = self._num_evicted, [*reversed(self._latest)]
        self._num_evicted = 0
        self._latest.clear()
        return taken

    def held(self, node: Node) -> None:
        """KV is the server's affair."""

    def dropped(self, node: Node) -> None:
        """KV is the server's affair."""

    def split(self, upper: Node, lower: Node) -> None:
        """A split changes no memory."""

    def joined(self, upper: Node, lower: Node) -> None:
        """A merge changes no memory."""

    def _settle(self) -> None:
        """Add what the counters, which come after, say of the eviction before."""
        if self._pending is None:
            return
        hash_, depth, num_tokens_before, idle_s = self._pending
        self._pending = None
        counts = self._counters.num_evictions
        need = next((need for need in Need if counts[need] != self._counts[need]), None)
        self._counts = dict(counts)
        num_tokens = self._counters.num_evicted_tokens - num_tokens_before
        name = "" if need is None else need.value
        self._latest.append(EvictedState(hash_, depth, num_tokens, name, round(idle_s, 3)))
        self._num_evicted += 1
