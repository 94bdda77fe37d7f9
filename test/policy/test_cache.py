"""`BudgetCache`: hits, what a request leaves, budgets, locks of running requests, counters."""

from dataclasses import dataclass

import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.eviction.classed import ClassedEviction
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.request import Request, pack
from marconi.replay.admission.every_block import EveryBlock
from marconi.tree import RadixTree, check_invariants
from marconi_lab.eviction.joint_lru import JointLru
from rig.budget_cache import Budget, BudgetCache, JointBudget, SplitBudget

COSTS = Costs(kv_bytes_per_token=1, state_bytes=10, flops=float)
PLENTY = JointBudget(1 << 30)
TWO_POOLS = frozenset({Need.KV, Need.STATE})


def request(text: str, now_s: float = 0.0, num_output_tokens: int = 1, *, unit_tokens: int = 1) -> Request:
    """A request whose prompt is `text` less its output; the first sampled token is the last of `text`."""
    num_tokens = len(text) * unit_tokens
    return Request(pack(map(ord, text)), num_tokens - num_output_tokens, num_output_tokens, num_tokens, now_s)


def cache(budget: Budget = PLENTY, eviction: Eviction | None = None, max_ghosts: int = 0) -> BudgetCache:
    return BudgetCache(
        RadixTree(max_ghosts=max_ghosts), Judicious(least_tokens=1), eviction or JointLru(), COSTS, budget
    )


def depths(of: BudgetCache) -> list[int]:
    return sorted(node.depth for node in of.tree.nodes() if node.has_state)


# Hits


def test_a_conversation_goes_on_from_its_last_decoded_token() -> None:
    held = cache()
    assert held.serve(request("abcdef", num_output_tokens=3)) == 0
    assert depths(held) == [5], "the last sampled token is not processed"
    assert held.serve(request("abcdefghi")) == 5


def test_the_last_prompt_token_is_always_recomputed() -> None:
    held = cache()
    held.serve(request("abcdef"))
    assert depths(held) == [5]
    assert held.serve(request("abcdef")) == 0, "a prompt of 5 tokens may use 4 of them at most"
    assert depths(held) == [4, 5]
    assert held.serve(request("abcdef")) == 4


def test_a_shared_prefix_is_kept_from_its_second_occurrence_and_hit_from_its_third() -> None:
    held = cache()
    assert [held.serve(request(text)) for text in ("sysab", "syscd", "sysef")] == [0, 0, 3]
    assert depths(held) == [3, 4, 4, 4]


def test_a_prefix_that_only_a_ghost_remembers_counts_as_an_occurrence() -> None:
    held = cache(JointBudget(20), max_ghosts=9)
    held.serve(request("sysab", 1.0))
    held.serve(request("qqqqqq", 2.0))
    assert depths(held) == [5], "the first was evicted"
    held.budget = PLENTY
    held.serve(request("syscd", 3.0))
    assert depths(held) == [3, 4, 5]


def test_tokens_of_unknown_identity_are_neither_matched_nor_kept() -> None:
    tree = RadixTree(unit_tokens=4)
    held = BudgetCache(tree, Judicious(4, least_tokens=1), JointLru(), COSTS, PLENTY)
    partial = Request(pack([1, 2, 3]), num_prompt_tokens=10, num_output_tokens=5, num_known_tokens=8, arrival_s=0.0)
    held.serve(partial)
    assert depths(held) == [8]
    assert held.serve(partial) == 8


# Budgets


def test_a_request_larger_than_the_memory_is_counted_and_neither_kept_nor_paid_for_by_others() -> None:
    held = cache(JointBudget(15))
    held.serve(request("abcd", 1.0))
    assert held.serve(request("qqqqqqq", 2.0)) == 0
    assert held.counters.num_too_large == 1
    assert depths(held) == [3]
    assert sum(held.counters.num_evictions.values()) == 0


def test_one_pool_is_never_exceeded_and_what_ran_least_recently_goes() -> None:
    held = cache(JointBudget(40))
    for now_s, text in enumerate(("aaaa", "bbbb", "cccc", "aaaax", "dddd")):
        held.serve(request(text, float(now_s)))
        assert held.num_bytes <= 40
    assert held.tree.match(pack(map(ord, "bbb")), 9).num_live_tokens == 0
    assert held.tree.match(pack(map(ord, "aaaa")), 9).checkpoint.depth == 4
    check_invariants(held.tree)


def test_two_pools_are_kept_apart_and_counted_by_their_need() -> None:
    held = cache(SplitBudget(kv_bytes=12, state_bytes=30), SeparateLru(TWO_POOLS))
    for now_s, text in enumerate(("aaaaaaa", "bbbbbbb", "ccc", "d", "e")):
        held.serve(request(text + "z", float(now_s)))
        assert held.tree.num_tokens <= 12
        assert held.tree.num_states <= 3
    assert held.counters.num_evictions == {Need.BYTES: 0, Need.KV: 1, Need.STATE: 1}
    assert held.counters.num_evicted_tokens == 14


def test_an_interior_state_goes_without_its_kv_where_states_are_short() -> None:
    held = cache(SplitBudget(kv_bytes=99, state_bytes=20), SeparateLru(TWO_POOLS))
    for now_s, text in enumerate(("ab", "abcd", "abcdef")):
        held.serve(request(text, float(now_s)))
    assert depths(held) == [3, 5]
    assert held.tree.num_tokens == 5


def test_the_deepest_state_of_a_request_is_not_the_victim_of_its_own_finish() -> None:
    held = cache(JointBudget(40), UtilityEviction(COSTS, alpha=100.0))
    held.serve(request("a" * 12, 1.0))
    held.serve(request("bb", 2.0))
    held.serve(request("cc", 3.0))
    assert 1 in depths(held), "though its benefit is the least"


# Running requests


def test_the_state_that_a_running_request_started_from_is_not_evicted() -> None:
    held = cache(JointBudget(30))
    held.serve(request("abcd", 0.0))
    lease = held.start(request("abcdef", 1.0), 1.0)
    held.serve(request("qqqqqqqq", 2.0))
    held.serve(request("rrrrrrrr", 3.0))
    assert depths(held) == [3, 7]
    held.finish(lease, 4.0)
    assert depths(held) == [3, 5]
    check_invariants(held.tree)


def test_where_all_else_is_locked_what_a_request_leaves_goes_at_once() -> None:
    held = cache(JointBudget(30))
    held.serve(request("abcdefgh", 0.0))
    lease = held.start(request("abcdefghij", 1.0), 1.0)
    held.serve(request("qqqqqqqq", 2.0))
    assert depths(held) == [7]
    held.finish(lease, 3.0)
    assert held.num_bytes <= 30


def test_every_state_that_a_request_leaves_is_as_young_as_the_request() -> None:
    held = cache(SplitBudget(kv_bytes=99, state_bytes=50), SeparateLru(TWO_POOLS))
    held.serve(request("sysab", 0.0))
    leases = [held.start(request("syscd", 1.0), 1.0) for _ in range(2)]
    held.finish(leases[0], 2.0)
    held.serve(request("qq", 3.0))
    held.serve(request("sysabc", 4.0))
    held.finish(leases[1], 5.0)
    held.serve(request("rr", 6.0))
    assert depths(held) == [1, 3, 4, 4, 5], "the branch was left again at 5 s, so 'q' of 3 s goes"


# Counters


def test_counters_tell_what_happened() -> None:
    held = cache(JointBudget(30))
    for now_s, text in enumerate(("abcd", "abcdef", "q")):
        held.serve(request(text + "z", float(now_s)))
    counters = held.counters
    assert (counters.num_requests, counters.num_prompt_tokens) == (3, 4 + 6 + 1)
    assert (counters.num_hit_tokens, counters.num_states_hit, counters.num_states_written) == (4, 1, 3)
    assert counters.num_evictions[Need.BYTES] == 1
    assert counters.num_evicted_tokens == 2


# Ties


@dataclass(eq=False)
class Fixed:
    """A leaf whose facts are given."""

    serial: int
    last_hit_s: float
    benefit: float
    num_children: int = 0


class GivenBenefit(ClassedEviction):
    """The benefit is written on the node."""

    def benefit(self, node: Fixed) -> float:  # type: ignore[override]
        return node.benefit


@pytest.mark.parametrize("now_s", [3.0, 49.0, 98.0, 103.0])
def test_the_newest_of_least_benefit_and_the_oldest_of_most_tie_at_weight_one(now_s: float) -> None:
    rule = GivenBenefit(1.0)
    oldest, newest = Fixed(1, 0.0, 8.0), Fixed(2, now_s, 1.0)
    for node in (newest, oldest):
        rule.update(node)  # type: ignore[arg-type]
    assert rule.victim(Need.BYTES, now_s) is oldest, "both score 1"


@pytest.mark.parametrize(
    ("budget", "kept"),
    [(JointBudget(39), [3, 6, 9]), (JointBudget(38), [6, 9]), (JointBudget(19), [9]), (JointBudget(18), [])],
)
def test_of_the_states_that_do_not_all_fit_the_deepest_are_left(budget: Budget, kept: list[int]) -> None:
    held = BudgetCache(RadixTree(), EveryBlock(3), JointLru(), COSTS, budget)
    held.serve(request("abcdefghij"))
    assert depths(held) == kept
    assert held.counters.num_too_large == (not kept)


def test_two_pools_leave_as_many_states_as_theirs_holds() -> None:
    held = BudgetCache(RadixTree(), EveryBlock(3), SeparateLru(TWO_POOLS), COSTS, SplitBudget(9, 20))
    held.serve(request("abcdefghij"))
    assert depths(held) == [6, 9]


def test_states_free_of_charge_fit_wherever_the_kv_does() -> None:
    free = Costs(kv_bytes_per_token=1, state_bytes=0, flops=float)
    for num_bytes, kept in ((9, [3, 6, 9]), (8, [])):
        held = BudgetCache(RadixTree(), EveryBlock(3), JointLru(), free, JointBudget(num_bytes))
        held.serve(request("abcdefghij"))
        assert depths(held) == kept
