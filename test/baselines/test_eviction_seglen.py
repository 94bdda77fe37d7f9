import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Eviction
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.request import Request, pack
from marconi.tree import RadixTree
from marconi_lab.eviction.seglen import SegmentLengthEviction
from policy.random_runs import HYBRID_COSTS
from rig.budget_cache import BudgetCache, JointBudget


def request(first_id: int, num_tokens: int, arrival_s: float) -> Request:
    return Request(pack(range(first_id, first_id + num_tokens + 1)), num_tokens, 1, num_tokens + 1, arrival_s)


@pytest.mark.parametrize(
    ("rule", "depths"),
    [(SegmentLengthEviction(), [20, 40, 50]), (UtilityEviction(HYBRID_COSTS), [20, 40, 55])],
    ids=["seglen", "lru"],
)
def test_a_state_close_behind_another_goes_first_by_hand(rule: Eviction, depths: list[int]) -> None:
    """At 4 s a state of 20 tokens needs room. States: 50 and 55 of one conversation (both used at 2 s), and 40 (3 s).

    Segments of 50, 5 and 40 tokens are, normalised, 1, 0 and 0.78; recency is 0, 0 and 0.5. Sums of 1, 0 and 1.28: the
    state at 55 goes. By recency alone it is the one made first, at 50.
    """
    tree = RadixTree()
    cache = BudgetCache(tree, Judicious(least_tokens=1), rule, HYBRID_COSTS, JointBudget(55 + 40 + 20 + 4 * 40 - 1))
    for each in (request(0, 50, 1), request(0, 55, 2), request(1000, 40, 3), request(2000, 20, 4)):
        cache.serve(each)
    assert sorted(node.depth for node in tree.nodes()) == depths


def test_the_benefit_is_the_length_to_replay() -> None:
    tree = RadixTree()
    rule = SegmentLengthEviction()
    cache = BudgetCache(tree, Judicious(least_tokens=1), rule, HYBRID_COSTS, JointBudget(10_000))
    for each in (request(0, 50, 1), request(0, 55, 2)):
        cache.serve(each)
    assert [rule.benefit(node) for node in sorted(tree.nodes(), key=lambda node: node.depth)] == [50, 5]
