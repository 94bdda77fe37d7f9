import pytest

from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.request import Request, pack
from marconi.replay.admission.every_block import EveryBlock
from marconi.tree import Node, RadixTree
from marconi_lab.eviction.end_aware import NextPrompts
from marconi_lab.eviction.length_aware import LengthAwareLru
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
            latest = conversations.extended_by[conversations.of[node]][-1]
            later = [r for r in requests if r.session == latest.session and r.turn == latest.turn + 1]
            return not later or later[0].num_prompt_tokens - depth_above(node) <= 12

        return LengthAwareLru(NextPrompts(requests), 12, needs), free_then_lru(is_free)

    compare(extent, make)


def test_a_short_next_prompt_lets_more_of_the_tail_go() -> None:
    requests = [
        Request(pack(range(1000, 1101)), 100, 1, 101, 1.0, session=0, turn=0),
        Request(pack(range(2000, 2101)), 100, 1, 101, 2.0, session=1, turn=0),
        Request(pack(range(3000, 3051)), 50, 1, 51, 3.0, session=2, turn=0),
        Request(pack(range(1000, 1131)), 130, 1, 131, 4.0, session=0, turn=1),
        Request(pack(range(2000, 2111)), 110, 1, 111, 5.0, session=1, turn=1),
    ]
    tree = RadixTree()
    cache = BudgetCache(tree, EveryBlock(10), LengthAwareLru(NextPrompts(requests), 50), KV_COSTS, JointBudget(200))
    for request in requests[:3]:
        cache.serve(request)
    leaves = sorted((node.last_pass_s, node.depth) for node in tree.nodes() if not node.num_children)
    assert leaves == [(1.0, 80), (2.0, 70), (3.0, 50)], "needs are 80 of 130 and 60 of 110; 50 tokens were to go"


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_tokens must be finite and >= 0 tokens, got -1"):
        LengthAwareLru(lambda request: None, -1)
