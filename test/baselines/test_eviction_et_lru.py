import math
from dataclasses import replace
from typing import Any

import pytest

from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.request import Request, pack
from marconi.replay.admission.every_block import EveryBlock
from marconi.tree import Node, RadixTree
from marconi_lab.eviction.et_lru import ExpectedTailLru, TurnModel
from policy.random_runs import (
    KV_COSTS,
    Choose,
    Extent,
    NaiveConversations,
    compare,
    depth_above,
    extents,
    last_pass,
    random_requests,
    run,
)
from rig.budget_cache import BudgetCache, JointBudget

TURN_PER_S, END_PER_S, ADDED_TOKENS = 0.05, 0.02, 8.0
TURNS = TurnModel(TURN_PER_S, END_PER_S, ADDED_TOKENS)


def belief(silence_s: float) -> float:
    rate = TURN_PER_S + END_PER_S
    alive_and_silent = math.exp(-rate * silence_s)
    over = END_PER_S / rate * (1 - alive_and_silent)
    return alive_and_silent / (alive_and_silent + over)


def expected_excess(uncached_tokens: int, budget_tokens: int) -> float:
    """E[(uncached + Q - budget)+] for an exponential Q."""
    slack = budget_tokens - uncached_tokens
    return ADDED_TOKENS * math.exp(-slack / ADDED_TOKENS) if slack >= 0 else ADDED_TOKENS - slack


def least_expected_excess(costs: Costs, budget_tokens: int) -> Choose:
    def choose(candidates: list[Node], need: Need, now_s: float, conversations: NaiveConversations) -> Node:
        def order(node: Node) -> tuple[float, float, int, int]:
            length = conversations.lengths[conversations.of[node]]
            loss = expected_excess(length - depth_above(node), budget_tokens) - expected_excess(
                length - node.depth, budget_tokens
            )
            per_byte = 2 ** (math.floor(2 * math.log2(loss / costs.freed_bytes(node)) + 1e-9) / 2)
            return belief(now_s - node.last_pass_s) * per_byte, node.last_pass_s, -node.depth, node.serial

        return min(candidates, key=order)

    return choose


@extents
def test_every_victim_is_that_of_the_definition(extent: Extent) -> None:
    def make(costs: Costs, needs: frozenset[Need], requests: Any, budget_tokens: int) -> tuple[Eviction, Choose]:
        rule = ExpectedTailLru(costs, TURNS, budget_tokens, needs)
        return rule, least_expected_excess(costs, budget_tokens)

    compare(extent, make, budget_tokens=(0, 15, 40))


@pytest.mark.parametrize("seed", range(3))
def test_without_a_budget_and_with_equal_blocks_it_is_lru(seed: int) -> None:
    requests = [replace(each, arrival_s=float(index)) for index, each in enumerate(random_requests(seed, 50))]
    assert run(ExpectedTailLru(KV_COSTS, TURNS, 0), last_pass, requests) > 30


def test_tails_are_trimmed_in_turn_the_least_missed_block_first() -> None:
    tree = RadixTree()
    rule = ExpectedTailLru(KV_COSTS, TurnModel(0.01, 0.01, added_tokens=1), budget_tokens=40)
    cache = BudgetCache(tree, EveryBlock(10), rule, KV_COSTS, JointBudget(130), spares_newest=False)
    for first_id, num_tokens, arrival_s in ((1000, 61, 0.0), (2000, 61, 1.0), (3000, 41, 2.0)):
        path = pack(range(first_id, first_id + num_tokens))
        cache.serve(Request(path, num_tokens - 1, 1, num_tokens, arrival_s))
    # Without the block from 50 to 60 a prompt may add 30 tokens and meet the budget: a loss in e^-30; the next, e^-20.
    # So the last block of each goes before a second one of any, first that of the longest silent.
    leaves = sorted((node.last_pass_s, node.depth) for node in tree.nodes() if not node.num_children)
    assert leaves == [(0.0, 50), (1.0, 50), (2.0, 30)]


def test_belief_is_certain_at_a_turn_and_that_of_bayes_after_it() -> None:
    assert TURNS.log_belief(0) == 0
    assert math.exp(TURNS.log_belief(30)) == pytest.approx(belief(30))
    assert TURNS.log_belief(1e9) == pytest.approx(-(TURN_PER_S + END_PER_S) * 1e9)


@pytest.mark.parametrize("slack_tokens", [-50, -3, 0, 5, 60])
@pytest.mark.parametrize("cached_tokens", [1, 7, 200])
def test_the_loss_is_the_integral_of_the_probability_that_the_budget_is_missed(
    slack_tokens: int, cached_tokens: int
) -> None:
    steps = 20_000
    width = cached_tokens / steps
    points = (slack_tokens + (step + 0.5) * width for step in range(steps))
    integral = width * sum(math.exp(-max(point, 0) / ADDED_TOKENS) for point in points)
    assert math.exp(TURNS.log_loss(slack_tokens, cached_tokens)) == pytest.approx(integral, rel=1e-4)


def test_a_loss_too_small_for_a_float_still_has_an_order() -> None:
    assert TURNS.log_loss(1e5, 10) < TURNS.log_loss(9e4, 10) < -1000


@pytest.mark.parametrize("values", [(0, 1, 1), (1, -1, 1), (1, 1, math.inf)])
def test_rates_and_means_that_are_not_positive_and_finite_are_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must be finite and > 0, got"):
        TurnModel(*values)


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_tokens must be finite and >= 0 tokens, got -1"):
        ExpectedTailLru(KV_COSTS, TURNS, -1)


def test_a_need_it_was_not_made_for_is_an_error() -> None:
    with pytest.raises(KeyError):
        ExpectedTailLru(KV_COSTS, TURNS, 0).victim(Need.KV, 0.0)
