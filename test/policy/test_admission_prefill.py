"""Where a prefill leaves states: what the admission rule wants, the last useful position, and steps on the way."""

from collections.abc import Sequence

import pytest

from marconi.policy.admission.plan import Judicious, PrefillPlan, Wishes, prefill_plan
from marconi.policy.base import Role
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease, Request, pack
from marconi.tree import RadixTree


def lease_of(tree: RadixTree, ids: list[int]) -> Lease:
    request = Request(pack(ids), len(ids), 0, len(ids) // tree.unit_tokens * tree.unit_tokens, 0.0)
    return Lease(request, tree.match(request.path, len(ids) - 1))


def plan_of(tree: RadixTree, ids: list[int], step_tokens: int, asked: Sequence[int] = ()) -> PrefillPlan:
    lease, wishes = lease_of(tree, ids), Wishes(asked)
    return prefill_plan(Judicious(tree.unit_tokens), lease, tree.unit_tokens, step_tokens, wishes)


def test_a_new_prompt_leaves_a_state_before_its_last_token_and_steps_back_from_there() -> None:
    plan = plan_of(RadixTree(), list(range(100)), 30)
    assert plan == PrefillPlan([9, 39, 69, 99], {99: Role.END})


def test_where_slots_may_be_spare_each_step_is_divided_in_three() -> None:
    ids, wishes = list(range(100)), Wishes(fills_spare=True)
    plan = prefill_plan(Judicious(), lease_of(RadixTree(), ids), 1, 30, wishes)
    assert plan.depths == [9, 19, 29, 39, 49, 59, 69, 79, 89, 99]
    assert sorted(plan.depths, key=plan.precedence) == [9, 39, 69, 99, 89, 79, 59, 49, 29, 19]
    assert [depth for depth in plan.depths if plan.is_spare(depth)] == [19, 29, 49, 59, 79, 89]
    assert prefill_plan(Judicious(), lease_of(RadixTree(), ids[:31]), 1, 30, wishes).depths == [30], "no step"


def test_the_last_chunk_end_before_a_branch_point_fills_a_spare_slot() -> None:
    """Of a path of 240 that agrees with the prompt up to `known`, from a state at 64."""
    for known, depths in ((100, [100]), (128, [128]), (129, [128, 129]), (192, [128, 192]), (200, [192, 200])):
        tree = RadixTree()
        tree.insert(pack(range(64)), [64])
        tree.insert(pack([*range(known), *range(500, 740 - known)]), [240])
        plan = plan_of(tree, list(range(300)), 1000)
        assert plan.depths == [*depths, 299]
        assert [depth for depth in plan.depths if plan.is_spare(depth)] == depths[:-1]


def test_a_new_prompt_leaves_states_on_trial_over_what_is_new_of_it() -> None:
    """At chunk ends before the states near its end, as many as are allowed, none where another is planned."""
    tree = RadixTree()
    tree.insert(pack(range(100)), [100])
    for num_tokens, num_trials, depths in (
        (1000, 0, []),
        (190, 16, []),
        (194, 16, [192, 128]),
        (1000, 4, [960, 704, 448, 192]),
        (1000, 16, [*range(960, 127, -64)]),
        (1025, 2, [960, 512]),
    ):
        lease = lease_of(tree, list(range(num_tokens)))
        plan = prefill_plan(Judicious(), lease, 1, num_tokens - 65, Wishes(num_trials=num_trials))
        assert list(plan.trials) == [depth for depth in depths if depth != 64]
        assert all(map(plan.is_spare, plan.trials))
        by_precedence = sorted(plan.depths, key=plan.precedence)
        assert set(by_precedence[len(plan.depths) - len(plan.trials) :]) == set(plan.trials)


def test_of_the_positions_where_waiting_prompts_part_the_two_deepest_are_planned_and_need_no_role() -> None:
    wishes = Wishes(shared=(80, 60, 40))
    plan = prefill_plan(Judicious(), lease_of(RadixTree(), list(range(100))), 1, 1000, wishes)
    assert plan == PrefillPlan([60, 64, 80, 99], {99: Role.END, 64: Role.WAYPOINT})


def test_a_prompt_no_longer_than_a_step_leaves_no_steps() -> None:
    assert plan_of(RadixTree(), list(range(31)), 30).depths == [30]
    assert plan_of(RadixTree(), list(range(32)), 30).depths == [1, 31]


def test_steps_stay_beyond_what_is_hit() -> None:
    tree = RadixTree()
    tree.insert(pack(range(50)), [50])
    assert plan_of(tree, list(range(100)), 20).depths == [59, 79, 99]


def test_a_branch_point_where_a_step_falls_is_one_state() -> None:
    """A path of 80 that agrees with the prompt up to 39, where the first step back from 69 is 39."""
    tree = RadixTree()
    tree.insert(pack([*range(39), *range(500, 541)]), [80])
    plan = plan_of(tree, list(range(70)), 30)
    assert plan == PrefillPlan([9, 39, 69], {69: Role.END})


@pytest.mark.parametrize("step_tokens", [8, 10, 33])
def test_every_position_is_a_page_end(step_tokens: int) -> None:
    plan = plan_of(RadixTree(8, ids_per_unit=8), list(range(100)), step_tokens)
    assert plan.depths[-1] == 96
    assert all(depth % 8 == 0 and depth > 0 for depth in plan.depths)
    assert list(plan.depths) == sorted(set(plan.depths))


def test_a_prompt_of_one_token_leaves_nothing() -> None:
    assert plan_of(RadixTree(), [7], 30) == PrefillPlan([])


# Where a chat's system prompt ends

SYSTEM_END = 200


def plan_of_chat(tree: RadixTree, asked: Sequence[int] = (), shared: Sequence[int] = ()) -> PrefillPlan:
    """The plan of a chat of 300 tokens with a system prompt of 200."""
    wishes = Wishes(asked, shared, system_end=SYSTEM_END)
    return prefill_plan(Judicious(tree.unit_tokens), lease_of(tree, list(range(300))), tree.unit_tokens, 1000, wishes)


def test_a_new_system_prompt_leaves_a_state_that_has_to_be_worth_its_slot() -> None:
    plan = plan_of_chat(RadixTree())
    assert plan == PrefillPlan([192, 200, 299], {299: Role.END, 200: Role.PASSED, 192: Role.WAYPOINT})
    assert sorted(plan.depths, key=plan.precedence) == [299, 200, 192]
    assert plan_of_chat(RadixTree(16, ids_per_unit=16)).depths == [128, 192, 288]


@pytest.mark.parametrize(
    ("num_seen_tokens", "depths"),
    [(136, [128, 136, 192, 200, 299]), (137, [128, 137, 299]), (210, [192, 210, 299])],
)
def test_of_a_prompt_that_is_known_nearly_to_its_system_prompts_end_the_branch_point_is_kept(
    num_seen_tokens: int, depths: list[int]
) -> None:
    tree = RadixTree()
    tree.insert(pack([*range(num_seen_tokens), *range(500, 540)]), [num_seen_tokens + 40])
    assert plan_of_chat(tree).depths == depths


def test_a_system_prompts_end_that_stands_or_is_marked_is_not_planned_beside_it() -> None:
    tree = RadixTree()
    tree.insert(pack(range(250)), [200, 250])
    assert plan_of_chat(tree).depths == [299]
    assert plan_of_chat(RadixTree(), [197]).depths == [197, 299]
    assert plan_of_chat(RadixTree(), [100, 220]).depths == [100, 192, 200, 220, 299]


def test_where_waiting_prompts_part_at_a_system_prompts_end_it_needs_no_role() -> None:
    plan = plan_of_chat(RadixTree(), shared=(200,))
    assert plan == PrefillPlan([192, 200, 299], {299: Role.END, 192: Role.WAYPOINT})


# What the program asks for


def test_what_is_asked_for_is_planned_and_needs_no_role() -> None:
    assert plan_of(RadixTree(), list(range(100)), 200, [40]) == PrefillPlan([40, 99], {99: Role.END})
    assert plan_of(RadixTree(), list(range(100)), 200, [99]) == PrefillPlan([99])


def test_the_end_of_the_prompt_joins_the_state_before_its_last_token() -> None:
    assert plan_of(RadixTree(), list(range(100)), 200, [100]) == PrefillPlan([99, 100], {99: Role.END})


def test_a_prompt_of_one_token_leaves_its_end_where_that_is_asked_for() -> None:
    assert plan_of(RadixTree(), [7], 30, [1]) == PrefillPlan([1])


def test_a_repeat_leaves_what_is_asked_for_beyond_the_hit_alone() -> None:
    tree = RadixTree()
    tree.insert(pack(range(100)), [50, 99])
    assert plan_of(tree, list(range(100)), 200, [30, 50, 99, 100]) == PrefillPlan([100])


def test_what_is_asked_for_is_cut_to_the_page_before_it() -> None:
    tree = RadixTree(8, ids_per_unit=8)
    assert plan_of(tree, list(range(100)), 200, [7, 8, 47, 100]) == PrefillPlan([8, 40, 96])
    assert plan_of(tree, list(range(96)), 200, [96]) == PrefillPlan([88, 96], {88: Role.END})


def test_slots_go_to_what_is_wanted_the_shallower_first_and_then_to_what_has_to_be_worth_one() -> None:
    """A branch point at 45, two positions asked for, steps back from 99 every 30, and the state before the end."""
    tree = RadixTree()
    tree.insert(pack([*range(45), *range(500, 541)]), [86])
    plan = plan_of(tree, list(range(100)), 30, [80, 100])
    assert plan == PrefillPlan([9, 39, 45, 69, 80, 99, 100], {99: Role.END})
    assert sorted(plan.depths, key=plan.precedence) == [9, 39, 45, 69, 80, 100, 99]


def test_an_end_that_stands_already_is_not_planned_again() -> None:
    tree = RadixTree()
    tree.insert(pack(range(120)), [100, 120])
    hybrid = HybridCache(tree, Judicious(), Order(SeparateLru()))
    assert 100 not in hybrid.plan(lease_of(tree, list(range(100))), [100]).depths
    assert 90 in hybrid.plan(lease_of(tree, list(range(100))), [90]).depths
