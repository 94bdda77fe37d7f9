"""Tail-optimised Belady: its order by definition, by hand, and prompts beyond the budget."""

import random

import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.request import Request, Trace, pack
from marconi.replay.admission.every_block import EveryBlock
from marconi.tree import RadixTree
from marconi_lab.eviction.joint_lru import JointLru
from marconi_lab.hindsight.future import Future
from marconi_lab.hindsight.tail_belady import TailBeladyEviction
from policy.random_runs import KV_COSTS, Extent, extents
from rig.budget_cache import BudgetCache, JointBudget

from .hindsight_twin import Items, TailDefinition, compare, hits_of, most_hits

COSTS = Costs(kv_bytes_per_token=1, state_bytes=10, flops=float)


def turn(text: str, now_s: float) -> Request:
    """A prompt of all but the last letter, which is its answer."""
    return Request(pack(map(ord, text)), len(text) - 1, 1, len(text), now_s)


def holding(xi: int, *texts: str, num_served: int) -> tuple[BudgetCache, TailBeladyEviction]:
    """A cache with room for all, after the first of the requests."""
    trace = Trace("letters", 1, tuple(turn(text, float(now_s)) for now_s, text in enumerate(texts)))
    rule = TailBeladyEviction(COSTS, Future(trace), xi)
    held = BudgetCache(RadixTree(), Judicious(least_tokens=1), rule, COSTS, JointBudget(10_000))
    for request in trace.requests[:num_served]:
        held.serve(request)
    return held, rule


@pytest.mark.parametrize(("xi", "depth"), [(0, 6), (5, 6), (7, 6), (8, 4), (9, 4)])
def test_a_state_without_which_the_next_prompt_is_in_time_goes_first(xi: int, depth: int) -> None:
    # The next prompt from 'aaaa' has 8 tokens, which are in time uncached from a budget of 8 on; 'bbbbbb' is used
    # later than 'aaaa' and its prompt has 10 tokens.
    _, rule = holding(xi, "aaaa_", "bbbbbb_", "aaaaxxxx_", "bbbbbbyyyy_", num_served=2)
    victim = rule.victim(Need.BYTES, 2.0)
    assert victim is not None
    assert victim.depth == depth


def test_of_free_states_the_one_that_frees_most_goes_first() -> None:
    _, rule = holding(100, "aaaa_", "bbbbbb_", "cc_", "aaaaxxxx_", "bbbbbbyyyy_", num_served=3)
    victim = rule.victim(Need.BYTES, 3.0)
    assert victim is not None
    assert victim.depth == 6


def test_a_state_is_free_only_as_long_as_the_one_above_it_is_held() -> None:
    texts = ("aaaa_", "aaaabbbb_", "cccc_", "aaaabbbbdddd_", "ccccdddd_")
    held, rule = holding(8, *texts, num_served=3)
    tops = {node.depth: node for node in held.tree.nodes() if node.key[0] == ord("a") or node.depth == 8}
    # The prompt of 12 that comes next needs no more than 4 of its tokens cached: the state at 4 makes that at 8 free.
    assert rule.worth(tops[8])[0] == 0.0
    held.evict_node(tops[4], Need.BYTES, 3.0)
    assert rule.worth(tops[8])[0] == 1.0, "12 - 0 is beyond a budget of 8"
    assert rule.next_use(tops[8]) == 3.0


def test_a_conversation_that_has_ended_is_free_at_once() -> None:
    texts = ("aaaa_", "bbbb_", "aaaaxx_")
    trace = Trace("letters", 1, tuple(turn(text, float(now_s)) for now_s, text in enumerate(texts)))
    rule = TailBeladyEviction(COSTS, Future(trace), 0)
    held = BudgetCache(RadixTree(), Judicious(least_tokens=1), rule, COSTS, JointBudget(20), spares_newest=False)
    assert [held.serve(request) for request in trace.requests] == [0, 0, 4], "'bbbb' went, though it was the newest"


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="budget_tokens"):
        TailBeladyEviction(COSTS, Future(Trace("none", 1, ())), -1)


@extents
def test_victims_are_those_of_the_definition(extent: Extent) -> None:
    definitions: list[TailDefinition] = []

    def make(costs: Costs, future: Future, needs: frozenset[Need]) -> tuple[TailBeladyEviction, TailDefinition]:
        definitions.append(TailDefinition(costs, future, 12))
        return TailBeladyEviction(costs, future, 12, needs), definitions[-1]

    compare(extent, make)
    assert sum(definition.num_spared for definition in definitions) > 50


# Prompts beyond the budget.


def num_beyond(cache: BudgetCache, trace: Trace, xi: int) -> int:
    """Prompts with more than `xi` uncached tokens."""
    return sum(request.num_prompt_tokens - cache.serve(request) > xi for request in trace.requests)


@pytest.mark.parametrize("seed", range(15))
def test_where_entries_are_equal_and_each_is_needed_no_choice_leaves_fewer_prompts_late(seed: int) -> None:
    """Provable: with xi below every prompt, a prompt is late exactly if its one entry is gone, and the rule is MIN."""
    rng = random.Random(seed)  # noqa: S311 - test data
    items = Items([rng.randrange(5) for _ in range(16)])
    num_places = rng.randint(1, 3)
    hits = hits_of(items, TailBeladyEviction(items.costs, Future(items.trace), 1), num_places)
    assert hits == most_hits(items.sequence, num_places)


def conversations(seed: int) -> Trace:
    """Attention-only traffic: ten conversations at a time, of some turns each, that share nothing."""
    rng = random.Random(seed)  # noqa: S311 - test data
    open_: list[list[int]] = []
    requests = []
    next_id = 0
    for now in range(250):
        if len(open_) < 10:
            open_.append([])
        history = rng.choice(open_)
        added = rng.randrange(1, 9)
        history.extend(range(next_id, next_id + added))
        next_id += added
        requests.append(Request(pack(history), len(history), 0, len(history), float(now)))
        if rng.random() < 0.2:
            open_.remove(history)
    return Trace("conversations", 1, tuple(requests))


@pytest.mark.parametrize("seed", range(6))
def test_of_conversations_block_by_block_fewer_prompts_are_late_than_with_lru(seed: int) -> None:
    """Not a theorem for prompts of unequal length: a claim about these traces, the first six of the generator."""
    trace, xi = conversations(seed), 8

    def late(rule: Eviction, num_tokens: int) -> int:
        return num_beyond(BudgetCache(RadixTree(), EveryBlock(1), rule, KV_COSTS, JointBudget(num_tokens)), trace, xi)

    for num_tokens in (60, 120):
        assert late(TailBeladyEviction(KV_COSTS, Future(trace), xi), num_tokens) < late(JointLru(), num_tokens)
