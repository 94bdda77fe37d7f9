from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Eviction
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.request import Request, pack
from marconi.tree import RadixTree
from marconi_lab.eviction.joint_lru import JointLru
from rig.budget_cache import Budget, BudgetCache, JointBudget, SplitBudget

from .random_runs import HYBRID_COSTS, SPLIT


def request(first_id: int, num_tokens: int, arrival_s: float) -> Request:
    """Leaves one state, at `num_tokens`."""
    return Request(pack(range(first_id, first_id + num_tokens + 1)), num_tokens, 1, num_tokens + 1, arrival_s)


TRACE = [request(0, 50, 1), request(0, 60, 2), request(9000, 30, 3), request(0, 70, 4)]
"""A conversation with states at 50, 60 and 70 tokens, and before its last turn another one with 30."""


def states_left(rule: Eviction, budget: Budget) -> list[int]:
    """Depths of the states left by `TRACE` and a request of 20 tokens."""
    tree = RadixTree()
    cache = BudgetCache(tree, Judicious(least_tokens=1), rule, HYBRID_COSTS, budget)
    for each in [*TRACE, request(7000, 20, 5)]:
        cache.serve(each)
    return sorted(node.depth for node in tree.nodes() if node.has_state)


ALL_BUT_ONE_STATE = JointBudget(70 + 30 + 20 + 5 * 40 - 1)


def test_sglang_plus_refreshes_the_whole_path_and_marconi_only_the_node_hit() -> None:
    assert states_left(JointLru(), ALL_BUT_ONE_STATE) == [20, 50, 60, 70], "30 was passed at 3 s, all others later"
    assert states_left(UtilityEviction(HYBRID_COSTS), ALL_BUT_ONE_STATE) == [20, 30, 60, 70], "50 was hit at 2 s"


def test_under_sglang_plus_a_path_goes_from_its_leaf() -> None:
    budget = JointBudget(60 + 30 + 3 * 40)
    assert states_left(JointLru(), budget) == [20, 50, 60]


def test_stock_sglang_drops_states_by_hit_and_kv_by_pass() -> None:
    room = 10_000
    assert states_left(SeparateLru(SPLIT), SplitBudget(kv_bytes=room, state_bytes=4 * 40)) == [20, 30, 60, 70]
    assert states_left(SeparateLru(SPLIT), SplitBudget(kv_bytes=119, state_bytes=room)) == [20, 50, 60, 70]


def test_stock_sglang_drops_the_state_of_a_branch_point_that_is_not_hit() -> None:
    shared = range(100)
    first, second, first_again = (
        Request(pack([*shared, *range(start, start + added + 1)]), 100 + added, 1, 101 + added, arrival_s)
        for start, added, arrival_s in ((1000, 20, 1.0), (2000, 20, 2.0), (1000, 30, 3.0))
    )
    tree = RadixTree()
    cache = BudgetCache(
        tree,
        Judicious(least_tokens=1),
        SeparateLru(SPLIT),
        HYBRID_COSTS,
        SplitBudget(kv_bytes=10_000, state_bytes=4 * 40),
    )
    for each in (first, second, first_again, request(7000, 20, 4)):
        cache.serve(each)
    (branch_point,) = (node for node in tree.nodes() if node.depth == 100)
    assert branch_point.num_children == 2
    assert not branch_point.has_state, "both conversations ran through it, neither started from it"
