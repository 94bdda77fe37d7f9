"""A cache's frames, one after the other: its nodes, and what happened since the frame before.

Nodes come from a walk in slices (`snapshot.py`), the rest from the cache's counters and from its evictions. Those are
watched for as long as somebody asks for frames: hashing a victim's prefix takes time, and remembering it memory. Owner:
whoever owns the cache.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Final

from marconi.policy.base import Costs, Need
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.misses import describe_kept
from marconi.policy.residency import gap_s
from marconi.tree import Kept, Node
from marconi.view.frame import MAX_EVICTED, EvictedState, Frame, PoolFrame
from marconi.view.snapshot import Columns, PrefixHashes, Walk
from marconi.view.standing import Standing

NOT_EXPLAINED: Final = "not explained (--marconi-explain off)"
"""In place of a cause."""


class Recorder:
    """Watches one cache, and those that take its place."""

    def __init__(
        self,
        hybrid: HybridCache,
        costs: Costs,
        pools: Callable[[Columns], list[PoolFrame]],
        patience_s: float = math.inf,
        max_hashed_bytes: float = math.inf,
    ) -> None:
        """`pools` describes the memory, given the nodes; what `hybrid` evicts is noted from now on.

        Nothing is noted any more once nobody has asked for `patience_s`, until somebody does. A walk hashes
        `max_hashed_bytes` at most.
        """
        self._costs, self._pools = costs, pools
        self._patience_s, self._max_hashed_bytes = patience_s, max_hashed_bytes
        self._asked_s = 0.0
        self._evicted: deque[EvictedState] = deque(maxlen=MAX_EVICTED)
        self.follow(hybrid)
        self._before = self._counts()
        self._watch()

    def follow(self, hybrid: HybridCache) -> None:
        """Walk through `hybrid` from now on, which has taken the place, and the watchers, of another."""
        self.hybrid = hybrid
        self._hashes = PrefixHashes(hybrid.tree)
        self._walk: Walk | None = None

    def advance(self, time_s: float, max_nodes: int) -> Frame | None:
        """Visit up to `max_nodes` further nodes; returns the frame, of `time_s`, once all are visited."""
        self._asked_s = time_s
        self._watch()
        if self._walk is None:
            standing = Standing(self.hybrid.order, time_s)
            self._walk = Walk(self.hybrid.tree, self._hashes, self._max_hashed_bytes, standing)
        if not self._walk.advance(max_nodes):
            return None
        nodes, self._walk = self._walk.columns(), None
        return self._frame(time_s, nodes)

    def _watch(self) -> None:
        if self not in self.hybrid.watchers:
            self.hybrid.watchers += (self,)

    def _look_away(self) -> None:
        self.hybrid.watchers = tuple(each for each in self.hybrid.watchers if each is not self)
        self._evicted.clear()
        self.follow(self.hybrid)

    def _frame(self, time_s: float, nodes: Columns) -> Frame:
        hits, missed, num_evicted = self._counts()
        hits_before, missed_before, num_evicted_before = self._before
        self._before = hits, missed, num_evicted
        evicted = [*reversed(self._evicted)]
        self._evicted.clear()
        return Frame(
            time_s=round(time_s, 3),
            num_requests=self.hybrid.counters.num_requests,
            kv_bytes_per_token=self._costs.kv_bytes_per_token,
            state_bytes=self._costs.state_bytes,
            pools=self._pools(nodes),
            nodes=nodes,
            hit_tokens=hits - hits_before,
            missed_tokens={
                cause: num - missed_before[cause] for cause, num in missed.items() if num > missed_before[cause]
            },
            num_evicted=num_evicted - num_evicted_before,
            evicted=evicted,
        )

    def _counts(self) -> tuple[int, dict[str, int], int]:
        """Hit tokens, missed tokens by cause and evictions so far."""
        counters = self.hybrid.counters
        missed = {cause.words: num for cause, num in counters.num_missed_tokens.items()}
        if self.hybrid.misses is None:
            missed = {NOT_EXPLAINED: counters.num_prompt_tokens - counters.num_hit_tokens}
        return counters.num_hit_tokens, missed, sum(counters.num_evictions.values())

    def resuming(self, node: Node, now_s: float) -> None:
        """Uses are counted by the cache."""

    def evicting(self, node: Node, need: Need, now_s: float, kept: Kept | None) -> None:
        """A state is about to be evicted."""
        if now_s - self._asked_s > self._patience_s:
            self._look_away()
            return
        idle_s = round(gap_s(node, now_s), 3)
        instead = "" if kept is None else describe_kept(kept)
        found = self._hashes.of(node)
        self._evicted.append(EvictedState(found, node.depth, node.freed_tokens, need.value, idle_s, instead))
