import math

import pytest

from marconi.policy.base import Costs, Need
from marconi.policy.request import Request, pack
from marconi.replay.admission.every_block import EveryBlock
from marconi.tree import Node, RadixTree
from marconi_lab.eviction.coverage import CoverageEviction
from policy.random_runs import SPLIT, Extent, NaiveConversations, compare, depth_above, extents
from rig.budget_cache import BudgetCache, JointBudget, SplitBudget

STATES_ONLY = Costs(kv_bytes_per_token=0, state_bytes=1, flops=float)


def thinnest(candidates: list[Node], need: Need, now_s: float, conversations: NaiveConversations) -> Node:
    if need is Need.KV:
        return min(candidates, key=lambda node: (node.last_pass_s, node.serial))
    oldest = min(candidates, key=lambda node: (node.last_hit_s, node.serial))
    path = conversations.of[oldest]

    def gap(node: Node) -> float:
        deeper = [member.depth for member in conversations.members_held(path) if member.depth > node.depth]
        return min(deeper) - depth_above(node) if deeper else math.inf

    on_path = [node for node in candidates if conversations.of[node] == path]
    return min(on_path, key=lambda node: (gap(node), node.serial))


@extents
def test_every_victim_is_that_of_the_definition(extent: Extent) -> None:
    worlds = ("hybrid", "hybrid-grid", "hybrid-split")
    compare(extent._replace(every=1), lambda costs, needs, _: (CoverageEviction(needs), thinnest), worlds)


def request(first_id: int, num_tokens: int, arrival_s: float) -> Request:
    return Request(pack(range(first_id, first_id + num_tokens)), num_tokens, 0, num_tokens, arrival_s)


def kilotokens(tree: RadixTree, arrival_s: float) -> list[int]:
    return sorted(node.depth // 1024 for node in tree.nodes() if node.has_state and node.last_hit_s == arrival_s)


def test_a_path_is_halved_evenly_and_keeps_its_end() -> None:
    tree = RadixTree()
    cache = BudgetCache(tree, EveryBlock(2048), CoverageEviction(), STATES_ONLY, JointBudget(16))
    cache.serve(request(0, 32768, arrival_s=1))
    assert kilotokens(tree, 1) == list(range(2, 33, 2))
    cache.serve(request(100_000, 8 * 2048, arrival_s=2))
    assert kilotokens(tree, 1) == list(range(4, 33, 4))
    cache.serve(request(200_000, 4 * 2048, arrival_s=3))
    assert kilotokens(tree, 1) == [8, 16, 24, 32]
    cache.serve(request(300_000, 2 * 2048, arrival_s=4))
    assert kilotokens(tree, 1) == [16, 32]
    assert cache.serve(request(0, 32768, arrival_s=5)) == 16384, "of the whole path the last token is computed again"


def test_the_least_recently_used_state_says_which_path_is_thinned() -> None:
    tree = RadixTree()
    cache = BudgetCache(tree, EveryBlock(2048), CoverageEviction(), STATES_ONLY, JointBudget(8))
    cache.serve(request(0, 4 * 2048, arrival_s=1))
    cache.serve(request(100_000, 4 * 2048, arrival_s=2))
    cache.serve(request(200_000, 2 * 2048, arrival_s=3))
    assert (kilotokens(tree, 1), kilotokens(tree, 2)) == ([4, 8], [2, 4, 6, 8])


def test_when_kv_is_short_the_oldest_leaf_goes() -> None:
    tree = RadixTree()
    costs = Costs(kv_bytes_per_token=1, state_bytes=1, flops=float)
    cache = BudgetCache(tree, EveryBlock(10), CoverageEviction(SPLIT), costs, SplitBudget(kv_bytes=60, state_bytes=99))
    cache.serve(request(0, 40, arrival_s=1))
    cache.serve(request(1000, 30, arrival_s=2))
    assert sorted(node.depth for node in tree.nodes() if not node.num_children) == [30, 30]


def test_a_need_it_was_not_made_for_is_an_error() -> None:
    with pytest.raises(KeyError):
        CoverageEviction().victim(Need.KV, 0.0)
