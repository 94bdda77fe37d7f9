import math

import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.eviction.utility import AgeingUtilityEviction, UtilityEviction
from marconi.policy.request import Request, pack
from marconi.tree import RadixTree
from rig.budget_cache import BudgetCache, JointBudget

from .random_runs import HYBRID_COSTS


def request(first_id: int, num_tokens: int, arrival_s: float) -> Request:
    return Request(pack(range(first_id, first_id + num_tokens + 1)), num_tokens, 1, num_tokens + 1, arrival_s)


@pytest.mark.parametrize(("alpha", "depths"), [(0.0, [20, 30]), (0.4, [20, 30]), (0.6, [30, 100]), (9.0, [30, 100])])
def test_recency_and_alpha_times_efficiency_by_hand(alpha: float, depths: list[int]) -> None:
    """At 3 s a state of 30 tokens needs room; those of 100 tokens (1 s) and 20 tokens (2 s) are there.

    FLOPs of n tokens are 10 n + n^2, bytes n + 40. Efficiencies: 11000 / 140 = 78.6 and 600 / 60 = 10; normalised, 1
    and 0. Recency: 0 and (2 - 1) / (3 - 1) = 0.5. So alpha against 0.5.
    """
    tree = RadixTree()
    cache = BudgetCache(tree, Judicious(), UtilityEviction(HYBRID_COSTS, alpha), HYBRID_COSTS, JointBudget(220))
    for each in (request(0, 100, 1), request(1000, 20, 2), request(2000, 30, 3)):
        cache.serve(each)
    assert sorted(node.depth for node in tree.nodes()) == depths


def test_efficiency_counts_from_the_nearest_shallower_state() -> None:
    tree = RadixTree()
    rule = UtilityEviction(HYBRID_COSTS, 10.0)
    cache = BudgetCache(tree, Judicious(), rule, HYBRID_COSTS, JointBudget(10_000))
    for each in (request(0, 100, 1), request(0, 110, 2)):
        cache.serve(each)
    shallow, deep = sorted(tree.nodes(), key=lambda node: node.depth)
    assert rule.benefit(deep) == (10 * 110 + 110**2 - 10 * 100 - 100**2) / (10 + 40)
    assert rule.benefit(shallow) == (10 * 100 + 100**2) / 40, "its KV stays in use"


@pytest.mark.parametrize("alpha", [-0.1, math.inf, math.nan])
def test_an_alpha_that_is_no_weight_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="weight must be finite and >= 0, got"):
        UtilityEviction(HYBRID_COSTS, alpha)


def test_what_is_dear_outlives_what_is_cheap_by_alpha_eviction_ages_and_is_evicted_then() -> None:
    """A prompt of 100 tokens comes once; one of 20 tokens comes every second, and each time the last one is evicted.

    The eviction age is then 1 s, so that under an alpha of 4 the long one is evicted when it is 4 s older than they.
    """
    tree = RadixTree()
    rule = AgeingUtilityEviction(HYBRID_COSTS, 4.0)
    cache = BudgetCache(tree, Judicious(), rule, HYBRID_COSTS, JointBudget(200))
    evicted_s = None
    for now_s in range(10):
        cache.serve(request(1000 * now_s, 100 if now_s == 0 else 20, now_s))
        if evicted_s is None and not any(node.depth == 100 for node in tree.nodes()):
            evicted_s = now_s
        assert rule.eviction_age_s is None or evicted_s is not None or rule.eviction_age_s == 1.0
    assert evicted_s == 5


def test_control_under_the_papers_form_it_stays() -> None:
    tree = RadixTree()
    cache = BudgetCache(tree, Judicious(), UtilityEviction(HYBRID_COSTS, 4.0), HYBRID_COSTS, JointBudget(200))
    for now_s in range(1000):
        cache.serve(request(1000 * now_s, 100 if now_s == 0 else 20, now_s))
    assert any(node.depth == 100 for node in tree.nodes())


def test_the_eviction_age_is_that_of_the_latest_victims() -> None:
    """Of victims 1 s old, and then of some 5 s old: the mean has left the first behind after some fifties of them."""
    tree = RadixTree()
    rule = AgeingUtilityEviction(HYBRID_COSTS)
    cache = BudgetCache(tree, Judicious(), rule, HYBRID_COSTS, JointBudget(60))
    for now_s in range(100):
        cache.serve(request(1000 * now_s, 20, now_s))
    assert rule.eviction_age_s == pytest.approx(1.0)
    for now_s in range(104, 1600, 5):
        cache.serve(request(1000 * now_s, 20, now_s))
    assert rule.eviction_age_s == pytest.approx(5.0, abs=0.05)
