"""GDSF, Greedy-Dual-Size-Frequency (Cherkasova, HP Labs report HPL-98-69; after Cao and Irani's Greedy-Dual-Size).

    priority(n) = inflation + frequency * cost / size

cost is the FLOPs that the state saves beyond the nearest shallower one, size the bytes that its eviction frees,
frequency the requests that have started from it plus the one that left it. The state of least priority is evicted, and
the inflation rises to that priority, if it is not beyond it already. A state's share of inflation is the one at its
last use, so a state that is never used again is overtaken in the end, however dear it was.

Neighbours that come and go change cost and size but are no use: they keep a state's inflation. One inflation serves
all pools. A state whose eviction frees nothing (free of charge, and its KV is in use) has an infinite priority, which
inflation does not rise to. A heap by priority, so a victim costs O(log n).
"""

import math
from collections.abc import Sequence

from marconi.policy.base import Costs, Need, NodeView
from marconi.policy.eviction.ranked import RankedEviction
from marconi.policy.request import Lease


class GreedyDualSizeFrequency(RankedEviction):
    """Evicts the least inflation plus frequency times FLOPs per byte."""

    def __init__(self, costs: Costs, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        super().__init__(needs)
        self._costs = costs
        self._inflation_at_use: dict[NodeView, float] = {}
        self.inflation = 0.0
        """Highest priority of a victim so far, in FLOPs per byte."""

    def worth(self, node: NodeView) -> float:
        """The priority."""
        num_bytes = self._costs.freed_bytes(node)
        if not num_bytes:
            return math.inf
        frequency = node.num_hits + 1
        return self._inflation_at_use[node] + frequency * self._costs.saved_flops(node) / num_bytes

    def arrived(self, lease: Lease, now_s: float) -> None:
        """Lift what the request starts from to the present inflation."""
        if lease.match.source is not None:
            self._inflation_at_use[lease.match.source] = self.inflation

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """Start `nodes` at the present inflation."""
        self._inflation_at_use.update(dict.fromkeys(nodes, self.inflation))

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Forget the last use of `node`."""
        del self._inflation_at_use[node]

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The node of least priority, to which the inflation rises; `KeyError` for a need not asked for."""
        node = super().victim(need, now_s)
        if node is not None and math.isfinite(priority := self.worth(node)):
            self.inflation = max(self.inflation, priority)
        return node
