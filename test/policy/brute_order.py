"""Eviction rules by their definitions: of all candidates, each looked at, the least goes first.

An order sees what a rule sees, so it ranks the states of the brute-force twin as well as the nodes of a tree.
"""

from collections.abc import Sequence

from marconi.policy.base import Costs, Need, NodeView
from marconi.policy.eviction.classed import benefit_class


class Order:
    """A rule by its definition."""

    def least(self, need: Need, now_s: float, candidates: Sequence[NodeView]) -> NodeView:
        """The first to go; for `Need.KV` only states without children are candidates."""
        raise NotImplementedError


class JointLruOrder(Order):
    """Last pass."""

    def least(self, need: Need, now_s: float, candidates: Sequence[NodeView]) -> NodeView:
        return min(candidates, key=lambda node: (node.last_pass_s, node.serial))


class SeparateLruOrder(Order):
    """KV by last pass, states by last hit."""

    def least(self, need: Need, now_s: float, candidates: Sequence[NodeView]) -> NodeView:
        if need is Need.KV:
            return min(candidates, key=lambda node: (node.last_pass_s, node.serial))
        return min(candidates, key=lambda node: (node.last_hit_s, node.serial))


class ClassedOrder(Order):
    """S of `classed.py`, times both ranges, among the oldest of each class; ties: oldest hit, then first made."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def benefit(self, node: NodeView) -> float:
        raise NotImplementedError

    def unit_s(self, oldest_s: float, now_s: float) -> float:
        return (now_s - oldest_s) or 1.0

    def least(self, need: Need, now_s: float, candidates: Sequence[NodeView]) -> NodeView:
        benefit = {node.serial: self.benefit(node) for node in candidates}
        t_min = min(node.last_hit_s for node in candidates)
        b_min, b_max = min(benefit.values()), max(benefit.values())

        def score(node: NodeView) -> tuple[float, float, int]:
            recency = (node.last_hit_s - t_min) * ((b_max - b_min) or 1.0)
            worth = self.weight * (benefit[node.serial] - b_min) * self.unit_s(t_min, now_s)
            return recency + worth, node.last_hit_s, node.serial

        oldest: dict[int, NodeView] = {}
        for node in sorted(candidates, key=lambda node: (node.last_hit_s, node.serial)):
            oldest.setdefault(benefit_class(benefit[node.serial]), node)
        return min(oldest.values(), key=score)


class SegmentLengthOrder(ClassedOrder):
    """Tokens to the nearest shallower state."""

    def benefit(self, node: NodeView) -> float:
        return node.depth - node.checkpoint_depth_above


class UtilityOrder(ClassedOrder):
    """FLOPs saved beyond the nearest shallower state, per byte freed."""

    def __init__(self, costs: Costs, alpha: float) -> None:
        super().__init__(alpha)
        self.costs = costs

    def benefit(self, node: NodeView) -> float:
        saved_flops = self.costs.flops(node.depth) - self.costs.flops(node.checkpoint_depth_above)
        return saved_flops / (node.freed_tokens * self.costs.kv_bytes_per_token + self.costs.state_bytes)


class AgeingUtilityOrder(UtilityOrder):
    """The same, by the mean age of the latest fifty victims, each weighed by a fiftieth."""

    def __init__(self, costs: Costs, alpha: float) -> None:
        super().__init__(costs, alpha)
        self.ages_s: list[float] = []

    def unit_s(self, oldest_s: float, now_s: float) -> float:
        mean_s = 0.0
        for number, age_s in enumerate(self.ages_s, start=1):
            mean_s += (age_s - mean_s) / min(number, 50)
        return (mean_s or 1.0) if self.ages_s else super().unit_s(oldest_s, now_s)

    def least(self, need: Need, now_s: float, candidates: Sequence[NodeView]) -> NodeView:
        victim = super().least(need, now_s, candidates)
        self.ages_s.append(now_s - victim.last_hit_s)
        return victim
