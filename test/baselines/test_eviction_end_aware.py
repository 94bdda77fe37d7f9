import pytest

from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.request import Request, pack
from marconi.replay.admission.every_block import EveryBlock
from marconi.tree import Node, RadixTree
from marconi_lab.eviction.end_aware import EndAwareLru, NextPrompts
from policy.random_runs import (
    KV_COSTS,
    Choose,
    Extent,
    NaiveConversations,
    compare,
    depth_above,
    extents,
    free_then_lru,
)
from rig.budget_cache import BudgetCache, JointBudget


@extents
def test_every_victim_is_that_of_the_definition(extent: Extent) -> None:
    def make(costs: Costs, needs: frozenset[Need], requests: list[Request]) -> tuple[Eviction, Choose]:
        def is_free(node: Node, conversations: NaiveConversations) -> bool:
            index = conversations.of[node]
            latest = conversations.extended_by[index][-1]
            goes_on = any(r.session == latest.session and r.turn > latest.turn for r in requests)
            return not goes_on or conversations.lengths[index] + 4 - depth_above(node) <= 12

        return EndAwareLru(NextPrompts(requests), 12, 4, needs), free_then_lru(is_free)

    compare(extent, make)


def test_an_ended_conversation_goes_before_an_older_one_that_goes_on() -> None:
    requests = [
        Request(pack(range(1000, 1041)), 40, 1, 41, 1.0, session=0, turn=0),
        Request(pack(range(2000, 2041)), 40, 1, 41, 2.0, session=1, turn=0),
        Request(pack(range(3000, 3021)), 20, 1, 21, 3.0, session=2, turn=0),
        Request(pack(range(1000, 1061)), 60, 1, 61, 4.0, session=0, turn=1),
    ]
    tree = RadixTree()
    cache = BudgetCache(tree, EveryBlock(10), EndAwareLru(NextPrompts(requests), 0), KV_COSTS, JointBudget(80))
    hits = [cache.serve(request) for request in requests]
    assert hits == [0, 0, 0, 40], "the third takes its place from the second, which has ended, not from the first"


def test_the_next_prompt_is_the_next_request_of_the_same_session() -> None:
    first, other, second = (
        Request(pack(range(9)), 8, 1, 9, 1.0, session=0, turn=0),
        Request(pack(range(5)), 4, 1, 5, 2.0, session=1, turn=0),
        Request(pack(range(20)), 19, 1, 20, 3.0, session=0, turn=1),
    )
    next_prompt = NextPrompts([first, other, second])
    assert [next_prompt(request) for request in (first, other, second)] == [19, None, None]


def test_a_request_outside_any_session_ends_its_own() -> None:
    named = Request(pack(range(9)), 8, 1, 9, 1.0, session=0)
    assert NextPrompts([named])(Request(pack(range(9)), 8, 1, 9, 2.0)) is None


def test_a_trace_without_sessions_is_refused() -> None:
    with pytest.raises(ValueError, match="no request names its session"):
        NextPrompts([Request(pack(range(9)), 8, 1, 9, 1.0)])
