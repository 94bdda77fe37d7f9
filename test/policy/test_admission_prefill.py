"""Where a prefill leaves states: what the admission rule wants, the last useful position, and steps on the way."""

import pytest

from marconi.policy.admission.judicious import Judicious
from marconi.policy.admission.prefill import PrefillPlan, prefill_plan
from marconi.policy.lease import Lease
from marconi.policy.request import Request, pack
from marconi.tree import RadixTree


def plan_of(tree: RadixTree, ids: list[int], step_tokens: int) -> PrefillPlan:
    request = Request(pack(ids), len(ids), 0, len(ids), 0.0)
    lease = Lease(request, tree.match(request.path, len(ids)))
    return prefill_plan(Judicious(tree.unit_tokens), lease, tree.unit_tokens, step_tokens)


def test_a_new_prompt_leaves_a_state_before_its_last_token_and_steps_back_from_there() -> None:
    plan = plan_of(RadixTree(), list(range(100)), 30)
    assert plan == PrefillPlan([9, 39, 69, 99], 99)


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
    assert plan == PrefillPlan([9, 39, 69], 69)


@pytest.mark.parametrize("step_tokens", [8, 10, 33])
def test_every_position_is_a_page_end(step_tokens: int) -> None:
    plan = plan_of(RadixTree(8, ids_per_unit=8), list(range(100)), step_tokens)
    assert plan.depths[-1] == 96
    assert all(depth % 8 == 0 and depth > 0 for depth in plan.depths)
    assert list(plan.depths) == sorted(set(plan.depths))


def test_a_prompt_of_one_token_leaves_nothing() -> None:
    assert plan_of(RadixTree(), [7], 30) == PrefillPlan([], None)
