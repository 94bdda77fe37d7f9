import pytest

from marconi.policy.request import Request, pack
from marconi.replay.admission.every_block import EveryBlock
from marconi.tree import Node, RadixTree
from marconi_lab.eviction.threshold_lru import ThresholdLru
from policy.random_runs import KV_COSTS, Extent, NaiveConversations, compare, extents, free_then_lru
from rig.budget_cache import BudgetCache, JointBudget


@extents
def test_every_victim_is_that_of_the_definition(extent: Extent) -> None:
    def is_short(node: Node, conversations: NaiveConversations) -> bool:
        return conversations.lengths[conversations.of[node]] <= 25

    compare(extent, lambda costs, needs, _: (ThresholdLru(25, needs), free_then_lru(is_short)))


def test_a_short_conversation_goes_before_an_older_long_one() -> None:
    tree = RadixTree()
    cache = BudgetCache(tree, EveryBlock(10), ThresholdLru(30), KV_COSTS, JointBudget(60))
    for first_id, num_tokens in ((1000, 41), (2000, 21), (3000, 21)):
        path = pack(range(first_id, first_id + num_tokens))
        cache.serve(Request(path, num_tokens - 1, 1, num_tokens, arrival_s=first_id))
    leaves = {(node.depth, node.last_pass_s) for node in tree.nodes() if not node.num_children}
    assert leaves == {(40, 1000), (20, 3000)}, "the second is as short as the third, and older"


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="threshold_tokens must be finite and >= 0 tokens, got -5"):
        ThresholdLru(-5)
