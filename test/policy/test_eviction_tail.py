import math
from typing import Any

import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.eviction.tail import TailEviction
from marconi.policy.request import Request, pack
from marconi.tree import Node, RadixTree
from rig.budget_cache import BudgetCache, JointBudget

from .random_runs import (
    HYBRID_COSTS,
    Choose,
    Extent,
    NaiveConversations,
    compare,
    depth_above,
    extents,
    free_then_lru,
)

HYBRID = ("hybrid", "hybrid-grid", "hybrid-split")


def ttft_s(num_cached_tokens: int, num_prompt_tokens: int) -> float:
    """Ten milliseconds a token, and a tenth of one for each pair of tokens."""
    return 0.01 * (num_prompt_tokens - num_cached_tokens) + 1e-4 * (num_prompt_tokens**2 - num_cached_tokens**2)


def smallest_cached_tokens(num_prompt_tokens: int, budget_s: float) -> int | None:
    return next((c for c in range(num_prompt_tokens) if ttft_s(c, num_prompt_tokens) <= budget_s), None)


def all_but(num_prompt_tokens: int, budget_s: float) -> int | None:
    """Of a model that takes a second a token."""
    found = max(0, math.ceil(num_prompt_tokens - budget_s))
    return found if found < num_prompt_tokens else None


def is_deeper_than_the_keeper(budget_s: float):
    """The definition: the state above it meets the budget."""

    def is_free(node: Node, conversations: NaiveConversations) -> bool:
        index = conversations.of[node]
        length = conversations.lengths[index]
        seen = conversations.growths[: conversations.num_growths_when_extended[index]]
        own = [grown for which, grown in seen if which == index]
        every = [grown for _, grown in seen]
        added = sum(own) / len(own) if own else sum(every) / len(every) if every else 0
        prompt = math.ceil(length + added)
        needed = next((c for c in range(length + 1) if ttft_s(c, prompt) <= budget_s), length)
        return depth_above(node) >= needed

    return is_free


@extents
def test_every_victim_is_that_of_the_definition(extent: Extent) -> None:
    def make(costs: Costs, needs: frozenset[Need], requests: Any, budget_s: float) -> tuple[Eviction, Choose]:
        rule = TailEviction(smallest_cached_tokens, budget_s, needs)
        return rule, free_then_lru(is_deeper_than_the_keeper(budget_s))

    compare(extent, make, HYBRID, budget_s=(0.05, 0.3, 0.6))


def request(num_tokens: int, arrival_s: float, first_id: int = 1000) -> Request:
    """A prompt and one output token, so that the state at its end stands for all but the last of `num_tokens`."""
    path = pack(range(first_id, first_id + num_tokens))
    return Request(path, num_tokens - 1, 1, num_tokens, arrival_s)


def depths_after(budget_s: float, num_bytes: int, requests: list[Request]) -> list[int]:
    tree = RadixTree()
    rule = TailEviction(all_but, budget_s)
    cache = BudgetCache(
        tree, Judicious(least_tokens=1), rule, HYBRID_COSTS, JointBudget(num_bytes), spares_newest=False
    )
    for each in requests:
        cache.serve(each)
    return sorted(node.depth for node in tree.nodes() if node.has_state)


def test_the_tail_goes_first_then_the_states_of_earlier_turns_and_the_shallowest_that_meets_the_budget_last() -> None:
    turns = [request(num_tokens, arrival_s=num_tokens) for num_tokens in (101, 121, 141, 161)]
    other = request(101, arrival_s=500, first_id=5000)
    # The last turn ends at 160 tokens; prompts grow by 20, so the next has 180. Within 50 s: 130 cached, which 140 is.
    # The other conversation has one state and needs it: of a prompt of 120 tokens, 70 cached.
    assert depths_after(50, 160 + 100 + 5 * 40, [*turns, other]) == [100, 100, 120, 140, 160]
    assert depths_after(50, 140 + 100 + 4 * 40, [*turns, other]) == [100, 100, 120, 140]
    assert depths_after(50, 140 + 100 + 3 * 40, [*turns, other]) == [100, 120, 140]
    assert depths_after(50, 140 + 100 + 2 * 40, [*turns, other]) == [100, 140]
    assert depths_after(50, 100 + 40, [*turns, other]) == [100]


def test_the_free_tail_of_the_newest_goes_before_what_older_ones_need() -> None:
    older = request(101, arrival_s=1, first_id=5000)
    turns = [request(num_tokens, arrival_s=num_tokens) for num_tokens in (101, 121, 141)]
    # With 140 and then 160 tokens, 110 are needed within 50 s: the state at 120 does, and 140 goes as it comes.
    assert depths_after(50, 100 + 120 + 3 * 40, [older, *turns]) == [100, 100, 120]


def test_growth_is_that_of_the_conversation_itself_once_it_has_grown() -> None:
    fast = [request(101, arrival_s=1, first_id=5000), request(401, arrival_s=2, first_id=5000)]
    slow = [request(301, arrival_s=3), request(303, arrival_s=4)]
    # The fast one grew by 300 and of 700 tokens needs all it has. The slow one grew by 2: of 304 tokens 254 are needed
    # and 300 meets it. By the mean over both, 151, it would need all, and the oldest state, at 100, would go instead.
    assert depths_after(50, 400 + 300 + 3 * 40, [*fast, *slow]) == [100, 300, 400]


def test_a_conversation_within_the_budget_from_scratch_goes_before_an_older_one_that_is_not() -> None:
    long, short, new = request(201, 1), request(41, 2, first_id=5000), request(41, 3, first_id=8000)
    assert depths_after(50, 200 + 40 + 2 * 40, [long, short, new]) == [40, 200]
    assert depths_after(300, 200 + 40 + 2 * 40, [long, short, new]) == [40, 40], "all are free: the oldest goes"


@pytest.mark.parametrize("budget_s", [-1.0, math.nan])
def test_a_budget_that_is_no_time_is_refused(budget_s: float) -> None:
    with pytest.raises(ValueError, match="budget_s must be >= 0 s to the first token, got"):
        TailEviction(all_but, budget_s)
