"""A server's host tier: copies are made before their originals are evicted, so that few evictions wait for one.

Between two steps of the scheduler the next victims are chosen ahead: they are *leaving*. Each is offered to the host
(`host_tier.py`) and, if that takes it, copied while the server continues; it is in use as long as that takes, and then
it is evicted first (`eviction/order.py`). What a request starts from meanwhile stays, and so does its copy.

    free + leaving + being copied  >=  MARGIN of the pool,  of KV and of states, or of the bytes of one pool

Where more is evicted at once than was chosen ahead, each further victim is copied at once if a single use of the copy
saves more than that takes, and evicted after it; others are dropped.
"""

from collections.abc import Callable, Mapping
from typing import Final

from marconi.policy.base import Need
from marconi.policy.eviction.order import Order
from marconi.policy.host_tier import HostMemory, HostTier, LoadTimes, hosted_depth
from marconi.policy.hybrid_cache import HybridCache
from marconi.tree import HostCopy, Node, RadixTree
from marconi.tree.memory import Memory

MARGIN: Final = 0.05
"""The share of each of the device's pools that is free, leaving or being copied."""


class WriteBehind(HostTier):
    """A host tier whose copies take time."""

    def __init__(
        self,
        tree: RadixTree,
        eviction: Order,
        memory: HostMemory,
        times: LoadTimes,
        rows: Memory,
        copy_now: Callable[[Node], None],
    ) -> None:
        """`copy_now` fills the copy of a node before it returns, or abandons it; the rest is `HostTier`'s."""
        super().__init__(tree, eviction, memory, times, rows)
        self._copy_now = copy_now
        self.num_chosen = 0
        """Victims that were chosen ahead."""
        self.being_copied: dict[Node, None] = {}

    def offer(self, node: Node, now_s: float) -> None:
        """Copy a victim that was not chosen ahead, if one use of the copy saves more than the wait for it."""
        pays = node.leaving is None and not node.has_copy and self._pays(node)
        if pays and self.take(node, now_s):
            self._copy_now(node)

    def _pays(self, node: Node) -> bool:
        """True if one use of a copy of `node` saves more than it takes to copy what the host lacks of its path."""
        depth = hosted_depth(node)
        worth_s = self.times.worth_between(min(node.lasting_depth_above, depth), node.depth)
        return worth_s > self.times.copy_s(node.depth - depth)

    def choose(self, cache: HybridCache, num_missing: Mapping[Need, int], now_s: float) -> list[Node]:
        """Choose victims of `cache` ahead until they free `num_missing` of each; returns those to be copied.

        The copies are there already, for who decides; the caller fills them, or abandons them.
        """
        order, chosen = cache.order, list[Node]()
        for need, num_wanted in num_missing.items():
            if num_wanted <= 0:
                continue
            num_leaving = self._num_leaving(order, need)
            while num_leaving < num_wanted:
                node = cache.next_to_leave(need, now_s)
                if node is None:
                    break
                assert isinstance(node, Node)
                num_leaving += self._amount(need, node.freed_tokens, 1)
                if self.take(node, now_s):
                    chosen.append(node)
                cache.evict_next(node, self.num_chosen)
                self.num_chosen += 1
        return [node for node in chosen if node.has_copy]

    def begin(self, node: Node) -> None:
        """The copy of `node` is under way; whoever makes it keeps `node` meanwhile."""
        self.being_copied[node] = None
        self.lock(_copy_of(node))

    def finish(self, node: Node) -> None:
        """The copy of `node` is there."""
        del self.being_copied[node]
        self.unlock(_copy_of(node))

    def abandon(self, node: Node) -> None:
        """There is no copy of `node`: it could not be begun."""
        self.copies.drop(_copy_of(node))
        self._rerank()

    def _num_leaving(self, order: Order, need: Need) -> int:
        """Tokens, states or bytes that the victims chosen so far free."""
        num_tokens = order.num_leaving_tokens + sum(node.freed_tokens for node in self.being_copied)
        return self._amount(need, num_tokens, order.num_leaving + len(self.being_copied))

    def _amount(self, need: Need, num_tokens: int, num_states: int) -> int:
        """Tokens and states in the unit of `need`: tokens, states or bytes."""
        if need is Need.BYTES:
            costs = self.times.costs
            return num_tokens * costs.kv_bytes_per_token + num_states * costs.state_bytes
        return num_tokens if need is Need.KV else num_states


def _copy_of(node: Node) -> HostCopy:
    assert node.host_copy is not None, f"{node} has no copy"
    return node.host_copy
