"""`best` beside its definition: a naive forecast that sees all the tree, and a scan of all candidates."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from marconi.policy.admission.plan import Guarded, Judicious
from marconi.policy.base import Costs, Eviction, Need, NodeView
from marconi.policy.eviction.best import LEVELS_PER_OCTAVE, MAX_RERANKS, BestEviction, log2_worth
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.forecast.hazard import waiting_index
from marconi.policy.request import Lease
from marconi.tree import Node, RadixTree
from rig.budget_cache import Budget, BudgetCache

from .naive_forecast import NaiveForecast
from .random_runs import depth_above

Class = tuple[int, int]
END_S = 1e6


class WatchedBest(BestEviction):
    """One victim in `every` is compared with that of a scan; the naive forecast receives what the rule receives."""

    every = 1

    def __init__(self, costs: Costs, forecast: Forecast, needs: frozenset[Need], tree: RadixTree) -> None:
        super().__init__(costs, forecast, needs)
        self.costs = costs
        self.forecast = forecast
        self.needs = needs
        self.tree = tree
        self.naive = NaiveForecast(tree)
        self.told_s = 0.0
        self.ranked: dict[tuple[Need, Node], Class] = {}
        """As last reported."""
        self.facts: dict[Node, tuple[int, int]] = {}
        """Of each node, when last reported."""
        self.victims: list[int] = []
        self.num_reranked = 0

    def arrived(self, lease: Lease, now_s: float) -> None:
        self.told_s = now_s
        self.naive.arrived(lease, now_s)
        super().arrived(lease, now_s)

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        self.told_s = now_s
        self.naive.admitted([node for node in nodes if isinstance(node, Node)], lease, now_s)
        super().admitted(nodes, lease, now_s)

    def evicting(self, node: NodeView, now_s: float) -> None:
        assert isinstance(node, Node)
        self.told_s = now_s
        self.naive.evicting(node, now_s)
        super().evicting(node, now_s)

    def update(self, node: NodeView) -> None:
        assert isinstance(node, Node)
        super().update(node)
        self.naive.look(self.told_s)
        self.facts[node] = facts(node)
        self.rank(node)

    def discard(self, node: NodeView) -> None:
        super().discard(node)
        self.naive.look(self.told_s)

    def rank(self, node: Node) -> None:
        for need in self.needs:
            self.ranked[need, node] = self.class_of(node, need)

    def class_of(self, node: Node, need: Need) -> Class:
        """By the definition, with the present forecast."""
        stratum = self.naive.stratum(node)
        weight = self.forecast.weight(stratum, self.naive.levels(node))
        kv_bytes = freed_tokens(node) * self.costs.kv_bytes_per_token
        freed_bytes = (kv_bytes if need is not Need.STATE else 0) + (
            self.costs.state_bytes if need is not Need.KV else 0
        )
        worth = weight * (node.depth - depth_above(node)) / max(freed_bytes, 1)
        return stratum, math.floor(math.log2(worth) * LEVELS_PER_OCTAVE)

    def scanned(self, need: Need, now_s: float) -> Node | None:
        """The victim by the documented rule; leaves `ranked` as the rule leaves its classes."""
        most = 0 if need is Need.KV else 1 << 30
        candidates = [
            node for node in self.tree.nodes() if node.has_state and not node.num_locks and node.num_children <= most
        ]
        for node in candidates:
            assert self.facts[node] == facts(node), f"{node} has changed unheard"
        if not candidates:
            return None
        for _ in range(MAX_RERANKS):
            least = self.least(candidates, need, now_s)
            before = self.ranked[need, least]
            self.rank(least)
            if self.ranked[need, least] == before:
                return least
            self.num_reranked += 1
        return self.least(candidates, need, now_s)

    def least(self, candidates: Sequence[Node], need: Need, now_s: float) -> Node:
        """The least of each class's ends, as last ranked; of equal ones the oldest, then the first made."""
        ends: dict[tuple[Class, int], Node] = {}
        for node in sorted(candidates, key=lambda node: node.serial):
            for sign in (1, -1):
                end = ends.setdefault((self.ranked[need, node], sign), node)
                if sign * node.last_hit_s < sign * end.last_hit_s:
                    ends[self.ranked[need, node], sign] = node
        candidates = list(ends.values())
        classes = [self.ranked[need, node] for node in candidates]
        log2_index = self.forecast.log2_index.tolist()
        worth = [
            log2_worth(log2_index[stratum], level, now_s - node.last_hit_s)
            for (stratum, level), node in zip(classes, candidates, strict=True)
        ]
        order = [(value, node.last_hit_s, node.serial) for value, node in zip(worth, candidates, strict=True)]
        return candidates[order.index(min(order))]

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        self.told_s = now_s
        ranked, is_compared = dict(self.ranked), len(self.victims) % self.every == 0
        expected = self.scanned(need, now_s) if is_compared else None
        self.ranked = ranked
        found = super().victim(need, now_s)
        assert found is expected or not is_compared, f"{found} went, {expected} is right"
        if found is not None:
            self.victims.append(found.serial)
        return found

    def check_lives(self) -> None:
        """Every life and every rate is that of the forecast that sees all."""
        seen = self.forecast._lives.seen(END_S)
        began_s = self.forecast._lives.began_s.tolist()[: len(seen.used)]
        columns = (seen.strata.tolist(), map(tuple, seen.levels.tolist()), began_s, seen.ages_s.tolist())
        lives = [(n.stratum, n.levels, n.began_s, n.age_s(END_S), n.used) for n in self.naive.lives]
        assert sorted(zip(*columns, seen.used.tolist(), strict=True)) == sorted(lives)
        baseline = np.array(self.naive.estimate.baseline)
        assert self.forecast._model.baseline == pytest.approx(baseline, rel=1e-9)
        assert self.forecast.index == pytest.approx(waiting_index(baseline), rel=1e-9)
        for factor, weights in enumerate(self.forecast._model.weights):
            assert weights == pytest.approx(np.array(self.naive.estimate.weights[factor]), rel=1e-9)


def facts(node: Node) -> tuple[int, int]:
    """What a rank hangs on, beside the forecast and the role."""
    return depth_above(node), freed_tokens(node)


def freed_tokens(node: Node) -> int:
    """KV that no other state needs, up to the nearest node with a state or another child."""
    if any(child.is_live for child in node.children.values()):
        return 0
    above = node.parent
    while above is not None and above.parent is not None:
        if above.has_state or sum(child.is_live for child in above.children.values()) > 1:
            break
        above = above.parent
    return node.depth - (above.depth if above is not None else 0)


def cache_of(
    costs: Costs, budget: Budget, needs: frozenset[Need], max_ghosts: int = 100_000, *, watched: bool = True
) -> BudgetCache:
    """A cache of `best`, with guards."""
    tree, forecast = RadixTree(max_ghosts=max_ghosts), Forecast()
    rule: Eviction = BestEviction(costs, forecast, needs)
    if watched:
        rule = WatchedBest(costs, forecast, needs, tree)
    return BudgetCache(tree, Guarded(Judicious(least_tokens=1), forecast.divergence, costs), rule, costs, budget)
