"""Marconi's eviction (section 4.2): recency plus alpha times FLOP efficiency, over leaves and single-child nodes.

The benefit of a node is its FLOP efficiency: FLOPs saved beyond the nearest shallower state per byte that eviction
frees (the state, and the KV that would be dead without it). `weight` is the paper's alpha; 0 is LRU.
"""

from typing import Final

from marconi.policy.eviction.base import Costs, Need, NodeView
from marconi.policy.eviction.classed import ClassedEviction

ALPHAS: Final = (0.0, *(0.05 * 1.5**step for step in range(20)))
"""21 values that are tried: recency alone, and from near it to FLOP efficiency almost alone (few benefits are far above
the rest)."""


class UtilityEviction(ClassedEviction):
    """Recency and FLOP efficiency."""

    def __init__(self, costs: Costs, alpha: float = 0.0, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        """`ValueError` for a negative or infinite alpha."""
        super().__init__(alpha, needs)
        self._costs = costs

    def benefit(self, node: NodeView) -> float:
        """FLOPs saved per byte freed; where states cost nothing, a node whose KV is in use counts as one byte."""
        return self._costs.saved_flops(node) / max(self._costs.freed_bytes(node), 1)
