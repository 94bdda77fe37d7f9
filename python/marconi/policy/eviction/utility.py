"""Marconi's eviction (section 4.2): recency plus alpha times FLOP efficiency, over leaves and single-child nodes.

The benefit of a node is its FLOP efficiency: FLOPs saved beyond the nearest shallower state per byte that eviction
frees (the state, and the KV that would be dead without it). `weight` is the paper's alpha; 0 is LRU.

The paper divides ages by the oldest one in the cache. A dear state therefore outlives all cheaper ones and becomes the
oldest, so that ages no longer matter: no one alpha pays on every traffic, and the paper tunes it while serving.
`AgeingUtilityEviction` divides by the *eviction age* instead, the mean age at which the latest victims were evicted:

    S(n) = alpha * benefit(n) - age(n) / eviction age                    benefit from 0, the least held, to 1

The dearest state outlives the cheapest by alpha eviction ages and is then evicted, and whatever else is held, ages
count for the same. A fixed alpha of 4 was settled on halves of recorded traces and on synthetic shapes, one of
them of long prompts that never return: of 3 to 8, the one with the widest margin to LRU where it saves least.
"""

from typing import Final

from marconi.policy.base import Costs, Need, NodeView
from marconi.policy.eviction.classed import ClassedEviction

ALPHA: Final = 4.0
"""Eviction ages by which the dearest state outlives the cheapest."""
_NUM_LATEST: Final = 50
"""Victims over which the eviction age is a mean."""


class UtilityEviction(ClassedEviction):
    """Recency and FLOP efficiency, as the paper has it."""

    def __init__(self, costs: Costs, alpha: float = 0.0, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        """`ValueError` for a negative or infinite alpha."""
        super().__init__(alpha, needs)
        self._costs = costs

    def benefit(self, node: NodeView) -> float:
        """FLOPs saved per byte freed; where states cost nothing, a node whose KV is in use counts as one byte."""
        return self._costs.saved_flops(node) / max(self._costs.freed_bytes(node), 1)


class AgeingUtilityEviction(UtilityEviction):
    """Recency and FLOP efficiency that ages."""

    def __init__(self, costs: Costs, alpha: float = ALPHA, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        """`ValueError` for a negative or infinite alpha."""
        super().__init__(costs, alpha, needs)
        self.eviction_age_s: float | None = None
        """Mean age of the latest victims; None before the first."""
        self._num_evicted = 0

    def unit_s(self, oldest_s: float, now_s: float) -> float:
        """The eviction age; before anything was evicted, the oldest age."""
        return super().unit_s(oldest_s, now_s) if self.eviction_age_s is None else self.eviction_age_s

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Note the age of a victim."""
        self._num_evicted += 1
        mean_s, age_s = self.eviction_age_s or 0.0, now_s - node.last_hit_s
        self.eviction_age_s = mean_s + (age_s - mean_s) / min(self._num_evicted, _NUM_LATEST)
