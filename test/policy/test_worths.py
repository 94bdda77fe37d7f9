"""The order that a rule states: that in which its definition would take all candidates, its next victim first."""

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Eviction, Need, NodeView
from marconi.policy.eviction.best import log2_worth
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.eviction.tail import TailEviction
from marconi.policy.eviction.utility import AgeingUtilityEviction
from marconi.policy.forecast.hazard import Floats
from marconi.tree import Node, RadixTree
from marconi_lab.eviction.joint_lru import JointLru
from rig.budget_cache import BudgetCache, JointBudget

from .best_twin import WatchedBest
from .best_twin import cache_of as best_cache
from .random_runs import (
    HYBRID_COSTS,
    WORLDS,
    Choose,
    Compared,
    free_then_lru,
    last_hit,
    last_pass,
    random_requests,
)
from .test_eviction_tail import is_deeper_than_the_keeper, smallest_cached_tokens


def stated(rule: Eviction, tree: RadixTree, now_s: float) -> list[Node]:
    """The nodes that a rule ranks, as it says."""
    nodes = [*tree.nodes()]
    rows = rule.worths(nodes, now_s)
    assert len(rows) == len(nodes)
    keys = {node: (*row.tolist(), node.serial) for node, row in zip(nodes, rows, strict=True) if not np.isnan(row[0])}
    return sorted(keys, key=keys.__getitem__)


class OrderWatched(Compared):
    """The order behind every victim is that of the definition, taken candidate by candidate."""

    num_orders = 0

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        found = super().victim(need, now_s)
        if need is Need.KV or found is None:
            return found
        rest = [
            node
            for node in self.tree.nodes()
            if node.has_state and not node.num_locks and node.num_children <= self.scope.value
        ]
        order = []
        while rest:
            order.append(self.choose(rest, need, now_s, self.conversations))
            rest.remove(order[-1])
        assert stated(self.rule, self.tree, now_s) == order
        assert order[0] is found
        self.num_orders += 1
        return found


RULES: dict[str, tuple[Callable[[frozenset[Need]], Eviction], Choose]] = {
    "lru": (SeparateLru, last_hit),
    "lru-joint": (JointLru, last_pass),
    "tail": (
        lambda needs: TailEviction(smallest_cached_tokens, 0.3, needs),
        free_then_lru(is_deeper_than_the_keeper(0.3)),
    ),
}


def orders_watched(name: str, world: str, seed: int) -> int:
    costs, budget, admission, needs = WORLDS[world]
    make, choose = RULES[name]
    tree = RadixTree(max_ghosts=30)
    watched = OrderWatched(make(needs), tree, choose)
    cache = BudgetCache(tree, admission, watched, costs, budget)
    for request in random_requests(seed, 50):
        cache.serve(request)
    return watched.num_orders


@pytest.mark.parametrize("world", ["hybrid", "hybrid-split"])
@pytest.mark.parametrize("name", RULES)
def test_the_order_is_that_in_which_the_definition_takes_all(name: str, world: str) -> None:
    assert sum(orders_watched(name, world, seed) for seed in range(2)) > 10


def test_an_order_by_another_key_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: victims are right, and of equal hits behind them the deepest comes first, not the first made."""

    def deepest_first(rule: SeparateLru, nodes: Sequence[NodeView], now_s: float) -> Floats:
        rows = super(SeparateLru, rule).worths(nodes, now_s)
        rows[:, 0] -= [1e-6 * node.depth for node in nodes]
        return rows

    monkeypatch.setattr(SeparateLru, "worths", deepest_first)
    with pytest.raises(AssertionError):
        [orders_watched("lru", "hybrid", seed) for seed in range(2)]


@pytest.mark.parametrize("world", ["hybrid", "hybrid-split"])
def test_the_order_of_best_is_by_its_worth_as_last_ranked(world: str) -> None:
    costs, budget, _, needs = WORLDS[world]
    cache = best_cache(costs, budget, needs, 30)
    rule = cache.eviction
    assert isinstance(rule, WatchedBest)
    need, num_orders = max(needs, key=lambda each: each.value), 0
    for request in random_requests(1, 60):
        cache.serve(request)
        now_s = request.arrival_s + 3.0
        log2_index = np.log2(rule.forecast.index)
        log2_index = (np.round(log2_index * 2**20) / 2**20).tolist()

        def key(node: Node, now_s: float = now_s, log2_index: Any = log2_index) -> tuple[float, float, int]:
            stratum, level = rule.ranked[need, node]
            return log2_worth(log2_index[stratum], level, now_s - node.last_hit_s), node.last_hit_s, node.serial

        expected = sorted((node for node in cache.tree.nodes() if node.has_state and not node.num_locks), key=key)
        assert stated(rule, cache.tree, now_s) == expected
        num_orders += len(expected) > 3
    assert num_orders > 10


def test_copies_are_ranked_by_the_forecast_as_the_device_has_fitted_it() -> None:
    """No request arrives at the rule of the host tier, which was made before the first fit."""
    costs, budget, _, needs = WORLDS["hybrid"]
    cache = best_cache(costs, budget, needs, 30)
    rule = cache.eviction
    assert isinstance(rule, WatchedBest)
    copies, before = (
        rule.for_copies(needs, lambda node, _: node.depth - node.checkpoint_depth_above),
        rule.forecast.index,
    )
    for request in random_requests(1, 60):
        cache.serve(request)
    now_s = request.arrival_s + 3.0
    held = [node for node in cache.tree.nodes() if node.has_state]
    for node in held:
        copies.update(node)
    worths = copies.worths(held, now_s)[:, 0].tolist()
    (classes,) = copies._classes.values()

    def by(index: Floats) -> list[float]:
        log2_index = (np.round(np.log2(index) * 2**20) / 2**20).tolist()
        keys = [classes.class_of(node) for node in held]
        return [
            log2_worth(log2_index[key[0]], key[1], now_s - node.last_hit_s)
            for key, node in zip(keys, held, strict=True)
            if key is not None
        ]

    assert worths == pytest.approx(by(rule.forecast.index))
    assert worths != pytest.approx(by(before)), "the control: not by the one that was there before any request"


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_marconi_is_by_its_score_and_its_victim_within_the_bound(seed: int) -> None:
    tree, rule = RadixTree(max_ghosts=30), AgeingUtilityEviction(HYBRID_COSTS)
    cache = BudgetCache(tree, Judicious(least_tokens=1), rule, HYBRID_COSTS, JointBudget(600))
    num_orders = 0
    for request in random_requests(seed, 60):
        cache.serve(request)
        now_s = request.arrival_s + 3.0
        held = [node for node in tree.nodes() if node.has_state and node.num_children <= rule.scope.value]
        if len(held) < 3:
            continue
        benefit = {node: Fraction(rule.benefit(node)) for node in held}
        unit = Fraction(rule.unit_s(min(node.last_hit_s for node in held), now_s) or 1.0)
        spread = (max(benefit.values()) - min(benefit.values())) or Fraction(1)
        score = {
            node: Fraction(node.last_hit_s) / unit + Fraction(rule.weight) * benefit[node] / spread for node in held
        }
        found = stated(rule, tree, now_s)
        assert {*found} == {*held}
        # Equal to the rounding of a float.
        scores = [float(score[node]) for node in found]
        assert all(after >= before - 1e-9 * abs(before) for before, after in pairwise(scores))
        victim = rule.victim(Need.BYTES, now_s)
        assert isinstance(victim, Node)
        slack = Fraction(rule.weight) * benefit[found[0]] * Fraction(2 ** (1 / 8) - 1) / spread
        assert float(score[victim] - score[found[0]]) <= float(slack) + 1e-9
        num_orders += 1
    assert num_orders > 10


def test_tiers_surround_the_rule_and_what_is_in_use_has_no_place() -> None:
    """On trial, chosen ahead, the rule's own, beyond its scope, set aside, awaited: as victims would be named."""
    draw = random.Random(0)  # noqa: S311 - a test's
    for _ in range(20):
        tree = RadixTree()
        order = Order(TailOfNothing())
        nodes = []
        for first in range(12):
            (node,) = tree.insert(bytes([first, 0, 0, 0, 1, 0, 0, 0]), [2])
            node.last_hit_s = node.last_pass_s = float(draw.randrange(4))
            node.leaving, node.first_waiting = draw.choice((None, None, first)), draw.choice((None, None, first))
            node.set_aside, node.on_trial = draw.random() < 0.3, draw.random() < 0.2
            nodes.append(node)
            if draw.random() < 0.8:
                order.update(node)
        rows = order.worths(nodes, 9.0)
        found = sorted(
            (node for node, row in zip(nodes, rows, strict=True) if not math.isnan(row[0])),
            key=lambda node: (*rows[nodes.index(node)].tolist(), node.serial),
        )
        taken = []
        while (victim := order.victim(Need.BYTES, 9.0)) is not None:
            taken.append(victim)
            order.discard(victim)
        assert found == taken


class TailOfNothing(JointLru):
    """A rule whose keys are of two entries, as those of several are."""

    def worth(self, node: NodeView) -> Any:
        return node.last_pass_s, -float(node.depth)
