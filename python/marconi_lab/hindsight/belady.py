"""Belady's rule for states: evicts the node whose next use lies furthest in the future.

The next use of a node is the next request that would start from it: one that reaches its position, but none of the
nearest states below, from which it would start instead. Among nodes that will never be used again the one that frees
most is evicted first. Where all entries are of one size and benefit, and a state may be evicted as soon as it was left,
no rule has more hits; else this is a strong reference rather than a proven optimum. A server has to make room for a
state before it is written, and so keeps every one until the next is short.

A state serves other requests when a deeper one is added or evicted, which the tree does not report of the state above:
that one is ranked again before the next victim.

Requires that requests are those of the trace that `Future` was made of; one that others have overtaken counts as past.
"""

import math
from collections.abc import Sequence

from marconi.policy.base import Costs, Need, NodeView, Scope
from marconi.policy.eviction.ranked import RankedEviction
from marconi.policy.request import Lease
from marconi.tree import Node
from marconi_lab.hindsight.future import Future, Prefix


class BeladyEviction(RankedEviction):
    """Evicts the node with the furthest next use."""

    scope = Scope.ANY

    def __init__(self, costs: Costs, future: Future, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        super().__init__(needs)
        self._costs = costs
        self._future = future
        self._now = -1
        self._prefix_of: dict[NodeView, Prefix | None] = {}
        """Where each held state stands in the future's tree."""

    def arrived(self, lease: Lease, now_s: float) -> None:
        """Move on to the request, the next of the trace or one that was passed over; `ValueError` for any other."""
        self._now = max(self._now, self._future.index_of(lease.request, self._now + 1))

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """Find `nodes` in the future."""
        request = lease.request
        for node in nodes:
            self._prefix_of[node] = self._future.prefix(request.path, node.depth, request.namespace)

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Forget `node`."""
        del self._prefix_of[node]

    def next_use(self, node: NodeView) -> float:
        """Index of the next request that would start from `node`; infinity if none."""
        assert isinstance(node, Node)
        prefix = self._prefix_of[node]
        if prefix is None:
            return math.inf
        below = [further for state in _nearest_states(node) if (further := self._prefix_of[state]) is not None]
        index = prefix.next_use(self._now, below)
        return math.inf if index is None else float(index)

    def worth(self, node: NodeView) -> tuple[float, ...]:
        """Rank sooner uses higher; among states that are never used, those that free fewer bytes."""
        next_use = self.next_use(node)
        return -next_use, -float(self._costs.freed_bytes(node)) if math.isinf(next_use) else 0.0


def _nearest_states(node: Node) -> list[Node]:
    found: list[Node] = []
    stack = list(node.live_children)
    while stack:
        below = stack.pop()
        if below.has_state:
            found.append(below)
        else:
            stack.extend(below.live_children)
    return found
