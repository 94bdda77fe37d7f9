import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.request import Request, pack
from marconi.replay.admission.every_block import EveryBlock
from marconi.tree import Node, RadixTree, check_invariants
from marconi_lab.eviction.tlru import TailOptimizedLru
from policy.random_runs import (
    HYBRID_COSTS,
    KV_COSTS,
    Choose,
    Extent,
    NaiveConversations,
    compare,
    depth_above,
    extents,
    free_then_lru,
    last_pass,
    random_requests,
    run,
)
from rig.budget_cache import BudgetCache, JointBudget, Lease


def is_tail_excess_safe(budget_tokens: int, added_tokens: int) -> Callable[[Node, NaiveConversations], bool]:
    """Whether the next prompt has no more than the budget uncached without the node."""

    def is_free(node: Node, conversations: NaiveConversations) -> bool:
        prompt_tokens = conversations.lengths[conversations.of[node]] + added_tokens
        return prompt_tokens - depth_above(node) <= budget_tokens

    return is_free


def request(ids: range, num_output_tokens: int, arrival_s: float) -> Request:
    return Request(pack(ids), len(ids) - num_output_tokens, num_output_tokens, len(ids), arrival_s)


def depths(tree: RadixTree) -> list[int]:
    """Depths of the leaves, in rising order."""
    return sorted(node.depth for node in tree.nodes() if not node.num_children)


@extents
def test_every_victim_is_that_of_the_definition(extent: Extent) -> None:
    def make(costs: Costs, needs: frozenset[Need], requests: Any, tokens: tuple[int, int]) -> tuple[Eviction, Choose]:
        return TailOptimizedLru(*tokens, needs), free_then_lru(is_tail_excess_safe(*tokens))

    compare(extent, make, tokens=((12, 4), (30, 0), (3, 10)))


def test_a_tail_is_trimmed_block_by_block_to_what_the_budget_needs_before_an_older_conversation_is_touched() -> None:
    tree = RadixTree()
    cache = BudgetCache(tree, EveryBlock(10), TailOptimizedLru(30, 10), KV_COSTS, JointBudget(150))
    cache.serve(request(range(1000, 1021), 1, arrival_s=1))
    assert depths(tree) == [20]  # needs 20 + 10 - 30 = 0 tokens
    cache.serve(request(range(2000, 2101), 1, arrival_s=2))
    assert depths(tree) == [20, 100]  # needs 100 + 10 - 30 = 80 tokens
    cache.serve(request(range(3000, 3041), 1, arrival_s=3))
    assert depths(tree) == [10, 40, 100], "160 tokens; all of the first is free and the oldest goes first"
    cache.serve(request(range(4000, 4041), 1, arrival_s=4))
    assert depths(tree) == [30, 40, 80], "190 tokens: the rest of the first, two blocks of the second, one of the third"


def test_trimming_stops_at_the_need_although_less_is_cached_with_every_block() -> None:
    tree = RadixTree()
    cache = BudgetCache(tree, EveryBlock(10), TailOptimizedLru(30, 10), KV_COSTS, JointBudget(100))
    cache.serve(request(range(1000, 1101), 1, arrival_s=1))
    cache.serve(request(range(2000, 2021), 1, arrival_s=2))
    assert depths(tree) == [20, 80]
    cache.serve(request(range(3000, 3021), 1, arrival_s=3))
    assert depths(tree) == [20, 80], "the second conversation needs nothing and is younger, yet goes first"


@pytest.mark.parametrize("seed", range(3))
def test_with_a_budget_no_larger_than_what_a_prompt_adds_it_is_lru(seed: int) -> None:
    requests = [replace(each, arrival_s=float(index)) for index, each in enumerate(random_requests(seed, 50))]
    assert run(TailOptimizedLru(7, 7), last_pass, requests) > 30


def test_overlapping_requests_leave_conversations_that_are_paths() -> None:
    for seed in range(3):
        tree = RadixTree(max_ghosts=30)
        rule = TailOptimizedLru(12, 4)
        cache = BudgetCache(tree, EveryBlock(3), rule, HYBRID_COSTS, JointBudget(900))
        running: list[Lease] = []
        for index, request in enumerate(random_requests(seed)):
            running.append(cache.start(request, request.arrival_s))
            while len(running) > index % 5:
                cache.finish(running.pop(index % len(running)), request.arrival_s)
            check_invariants(tree)
            held = {node for node in tree.nodes() if node.has_state}
            conversations = {rule.conversations.of(node) for node in held}
            assert sorted(node.serial for c in conversations for node in c.states) == sorted(n.serial for n in held)
            for conversation in conversations:
                for shallow, deep in itertools.pairwise(conversation.states):
                    assert shallow in ancestors(deep)
        assert sum(cache.counters.num_evictions.values()) > 30


def ancestors(node: Node) -> list[Node]:
    above = node.parent
    return [] if above is None else [above, *ancestors(above)]


@pytest.mark.parametrize(("budget_tokens", "added_tokens"), [(-1, 0), (0, -1)])
def test_negative_counts_are_refused(budget_tokens: int, added_tokens: int) -> None:
    with pytest.raises(ValueError, match="must be finite and >= 0 tokens, got -1"):
        TailOptimizedLru(budget_tokens, added_tokens)
