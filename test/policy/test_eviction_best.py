"""`best`: its victims against a scan of all candidates, and what it learns, in small worlds."""

import random
from collections import Counter
from itertools import count

import numpy as np
import pytest
from hypothesis import strategies as st

from marconi.policy.admission.plan import Guarded, Judicious
from marconi.policy.base import Costs, Need, NodeView
from marconi.policy.eviction import best
from marconi.policy.eviction.best import BestEviction
from marconi.policy.forecast import forecast
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.forecast.hazard import Floats, waiting_index
from marconi.policy.request import Request, pack
from marconi.tree import Node, RadixTree
from rig.budget_cache import BudgetCache, JointBudget, SplitBudget
from tree.faults import keep_to_itself

from .best_twin import WatchedBest, cache_of
from .random_runs import WORLDS, Extent, extents, lengths, random_requests, serve_overlapping, sources

SETTINGS = ("hybrid", "hybrid-split", "attention")


def watched(world: str, max_ghosts: int = 100_000) -> tuple[BudgetCache, WatchedBest]:
    costs, budget, _, needs = WORLDS[world]
    held = cache_of(costs, budget, needs, max_ghosts)
    assert isinstance(held.eviction, WatchedBest)
    return held, held.eviction


@extents
def test_victims_are_those_of_a_scan_by_worth_and_lives_and_rates_of_a_forecast_that_sees_all(extent: Extent) -> None:
    met: Counter[str] = Counter()

    def victims(world: str, source: random.Random, length: int, max_ghosts: int, num_running: int) -> int:
        held, rule = watched(world, max_ghosts)
        rule.every = extent.every
        serve_overlapping(held, random_requests(source, length), source, num_running)
        rule.check_lives()
        met.update(reranked=rule.num_reranked, used=sum(life.used for life in rule.naive.lives))
        met.update(f"stratum {life.stratum}" for life in rule.naive.lives)
        return len(rule.victims)

    num_victims = extent.draw(
        victims,
        SETTINGS,
        source=sources,
        length=lengths,
        max_ghosts=st.sampled_from((100_000, 20, 0)),
        num_running=st.sampled_from((1, 4)),
    )
    assert num_victims > 50 * extent.num_runs
    assert met["reranked"] > 2, "no victim's rank was out of date: the runs show little"
    assert met["used"] > 100
    assert len(met) > 8, "strata met"


# Negative controls: a planted fault turns the comparison red.


def run() -> None:
    held, _ = watched("hybrid-split")
    for request in random_requests(1):
        held.serve(request)


def test_a_rule_that_loses_updates_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    update, numbers = BestEviction.update, count(1)

    def lossy(rule: BestEviction, node: NodeView) -> None:
        if next(numbers) % 20:
            update(rule, node)

    monkeypatch.setattr(BestEviction, "update", lossy)
    with pytest.raises(AssertionError, match="is right"):
        run()


def test_a_rule_that_ranks_nothing_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best, "MAX_RERANKS", 0)
    with pytest.raises(AssertionError, match="is right"):
        run()


@pytest.mark.parametrize("note", ["_note_nearest_below", "_note_only_leaf"])
def test_a_tree_that_does_not_tell_what_changed_is_caught(note: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_to_itself(monkeypatch, note)
    with pytest.raises(AssertionError, match="unheard"):
        run()


# Determinism.


@pytest.mark.parametrize("world", SETTINGS)
def test_the_same_requests_have_the_same_victims(world: str) -> None:
    victims = []
    for _ in range(2):
        held, rule = watched(world)
        for request in random_requests(5, 100):
            held.serve(request)
        victims.append(rule.victims)
    assert victims[0] == victims[1]
    assert len(victims[0]) > 30


# What it does, in small worlds.

COSTS = Costs(kv_bytes_per_token=1, state_bytes=50, flops=float)
PLENTY = JointBudget(1 << 40)


def cache(*, with_guards: bool = False) -> BudgetCache:
    learned = Forecast()
    admission = (
        Guarded(Judicious(least_tokens=1), learned.divergence, COSTS) if with_guards else Judicious(least_tokens=1)
    )
    return BudgetCache(RadixTree(max_ghosts=10_000), admission, BestEviction(COSTS, learned), COSTS, PLENTY)


class Traffic:
    """Requests of new tokens, at times of their own."""

    def __init__(self, held: BudgetCache) -> None:
        self.held = held
        self._next_id = 0

    def tokens(self, num: int) -> list[int]:
        """New ones."""
        first = self._next_id
        self._next_id += num
        return list(range(first, first + num))

    def serve(self, path: list[int], now_s: float, num_output: int = 1) -> int:
        """Tokens that did not have to be computed."""
        return self.held.serve(Request(pack(path), len(path) - num_output, num_output, len(path), now_s))

    def state(self, path: list[int]) -> Node:
        """The state that a request has left at the end of a path: all but the last sampled token."""
        node = self.held.tree.match(pack(path), len(path)).checkpoint
        assert node.depth == len(path) - 1
        return node


def first_gone(held: BudgetCache, nodes: dict[str, Node], now_s: float) -> str:
    """Which of `nodes` goes first as memory shrinks."""
    while all(node.has_state for node in nodes.values()):
        held.budget = JointBudget(held.num_bytes - 1)
        held._shrink(now_s)
    held.budget = PLENTY
    (name,) = (name for name, node in nodes.items() if not node.has_state)
    return name


def test_a_branch_point_that_many_come_through_outlasts_the_ends_that_it_leads_to() -> None:
    held = cache()
    traffic = Traffic(held)
    system = traffic.tokens(300)
    ends = []
    for number in range(200):
        ends.append(system + traffic.tokens(100))
        traffic.serve(ends[-1], 10.0 * number)
    branch = held.tree.match(pack(system), 300).checkpoint
    assert branch.depth == 300
    assert first_gone(held, {"branch": branch, "end": traffic.state(ends[-1])}, 2000.0) == "end"


def documents(traffic: Traffic, num: int, num_apart: int, first_s: float = 0.0) -> list[int]:
    """Each document is asked twice, the last `num_apart` tokens apart; returns the hits of the second questions."""
    hits = []
    for number in range(num):
        document = traffic.tokens(200 - num_apart)
        now_s = first_s + 20.0 * number
        traffic.serve(document + traffic.tokens(num_apart), now_s)
        hits.append(traffic.serve(document + traffic.tokens(num_apart), now_s + 10.0))
    return hits


def test_where_prompts_part_before_the_end_a_guard_is_left_there_and_hit() -> None:
    traffic = Traffic(cache(with_guards=True))
    hits = documents(traffic, 40, num_apart=20)
    assert hits[:32] == [0] * 32, "64 requests pass before a distance is chosen"
    assert hits[32:] == [180] * 8
    assert traffic.held.counters.num_states_written == 2 * 32 + 32 + 8 * (2 + 1), "end and fork, then guard and end"


def test_where_prompts_part_nowhere_no_guard_is_left() -> None:
    traffic = Traffic(cache(with_guards=True))
    for number in range(50):
        first = traffic.tokens(200)
        traffic.serve(first, 20.0 * number)
        traffic.serve(first[:-1] + traffic.tokens(30), 20.0 * number + 10)
    assert traffic.held.counters.num_states_written == 100
    assert traffic.held.counters.num_hit_tokens == 50 * 199


def test_guards_are_left_no_more_once_prompts_part_no_more() -> None:
    traffic = Traffic(cache(with_guards=True))
    documents(traffic, 40, num_apart=20)
    for number in range(2200):
        traffic.serve(traffic.tokens(100), 1000.0 + number)
    before = traffic.held.counters.num_states_written
    traffic.serve(traffic.tokens(100), 4000.0)
    assert traffic.held.counters.num_states_written == before + 1


def sessions(traffic: Traffic, gap_s: float, num: int, num_turns: int, first_s: float) -> list[tuple[float, list[int]]]:
    """Turns of sessions that begin 7 s apart and go on every `gap_s`."""
    turns = []
    for session in range(num):
        path: list[int] = []
        for turn in range(num_turns):
            path = path[:-1] + traffic.tokens(100)
            turns.append((first_s + 7 * session + gap_s * turn, path))
    return turns


def test_states_that_their_conversation_has_passed_go_before_its_end_once_that_is_known() -> None:
    held = cache()
    traffic = Traffic(held)
    turns = sessions(traffic, 30.0, 60, 6, 0.0)
    for now_s, path in sorted([*turns, *(own := sessions(traffic, 30.0, 1, 3, 500.0))]):
        traffic.serve(path, now_s)
    passed, also_passed, end = (traffic.state(path) for _, path in own)
    assert first_gone(held, {"passed": passed, "end": end}, 570.0) == "passed"
    assert first_gone(held, {"passed": also_passed, "end": end}, 570.0) == "passed"


def test_a_slow_session_outlasts_a_fast_one_of_the_same_age_once_their_rhythms_are_known() -> None:
    held = cache()
    traffic = Traffic(held)
    turns = sessions(traffic, 2.0, 60, 6, 0.0) + sessions(traffic, 200.0, 60, 6, 3.0)
    last_s = max(now_s for now_s, _ in turns)
    fast, slow = sessions(traffic, 2.0, 1, 3, last_s + 396), sessions(traffic, 200.0, 1, 3, last_s)
    for now_s, path in sorted([*turns, *fast, *slow]):
        traffic.serve(path, now_s)
    nodes = {"fast": traffic.state(fast[-1][1]), "slow": traffic.state(slow[-1][1])}
    assert nodes["fast"].last_hit_s == nodes["slow"].last_hit_s == last_s + 400
    assert nodes["fast"].depth == nodes["slow"].depth
    assert first_gone(held, nodes, last_s + 400 + 60) == "fast"


@pytest.mark.parametrize(("num_before", "goes_first"), [(0, "chat"), (150, "document")])
def test_a_document_read_once_goes_first_as_soon_as_that_is_how_it_was(num_before: int, goes_first: str) -> None:
    """At first the long document saves more a byte than the short chat, whose state weighs as much as its tokens."""
    held = cache()
    traffic = Traffic(held)
    rng = random.Random(1)  # noqa: S311 - test data
    arrivals = []
    for number in range(num_before):
        arrivals.append((30.0 * number, traffic.tokens(2000)))
        chat: list[int] = []
        for turn in range(4):
            chat = chat[:-1] + traffic.tokens(60)
            arrivals.append((30.0 * number + 20 * turn + rng.random(), chat))
    now_s = 30.0 * num_before + 100
    document, chat = traffic.tokens(2000), traffic.tokens(60)
    for at_s, path in sorted([*arrivals, (now_s, document), (now_s, chat)]):
        traffic.serve(path, at_s)
    nodes = {"document": traffic.state(document), "chat": traffic.state(chat)}
    assert first_gone(held, nodes, now_s + 10) == goes_first


def hit_share_of_a_loop() -> float:
    """Fifty contexts, each asked again every 40 s or so, in memory for about a fifth of them."""
    held = cache()
    held.budget = JointBudget(10 * 1000)
    traffic, rng = Traffic(held), random.Random(7)  # noqa: S311 - test data
    asked = sorted((0.8 * one + 40 * turn + 4 * rng.random(), one) for turn in range(40) for one in range(50))
    paths = [traffic.tokens(900) for _ in range(50)]
    num_hit = 0
    for now_s, one in asked:
        paths[one] = paths[one][:-1] + traffic.tokens(3)
        num_hit += traffic.serve(paths[one], now_s)
    return num_hit / held.counters.num_prompt_tokens


def test_of_a_loop_over_more_than_fits_about_what_fits_is_hit() -> None:
    assert hit_share_of_a_loop() > 0.12


def test_with_an_index_that_never_rises_such_a_loop_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: among states that wait alike the oldest goes, shortly before its use."""

    def falling(hazard: Floats) -> Floats:
        index: Floats = np.maximum.accumulate(waiting_index(hazard)[:, ::-1], axis=1)[:, ::-1]
        return index

    monkeypatch.setattr(forecast, "waiting_index", falling)
    assert hit_share_of_a_loop() < 0.06


def test_what_a_request_has_just_left_may_be_its_own_victim() -> None:
    held = cache()
    held.spares_newest = False
    traffic = Traffic(held)
    worthy = traffic.tokens(1000)
    traffic.serve(worthy, 0.0)
    held.budget = JointBudget(held.num_bytes + 10)
    poor = traffic.tokens(3)
    traffic.serve(poor, 1.0)
    assert traffic.state(worthy).has_state
    assert held.tree.num_states == 1


# Pools and prices.


def test_where_kv_is_short_the_leaf_that_saves_least_a_byte_of_kv_goes() -> None:
    needs = frozenset({Need.KV, Need.STATE})
    rule = BestEviction(COSTS, Forecast(), needs)
    held = BudgetCache(RadixTree(), Judicious(least_tokens=1), rule, COSTS, SplitBudget(10_000, 10_000))
    traffic = Traffic(held)
    trunk = traffic.tokens(100)
    for now_s in (0.0, 1.0):
        traffic.serve(trunk + traffic.tokens(40), now_s)
    alone = traffic.tokens(41)
    traffic.serve(alone, 1.0)
    branch = held.tree.match(pack(trunk), 100).checkpoint
    victim = rule.victim(Need.KV, 10.0)
    assert victim is not None
    assert victim is not branch
    assert victim.num_children == 0
    assert rule.victim(Need.STATE, 10.0) is not None
    with pytest.raises(KeyError):
        rule.victim(Need.BYTES, 10.0)


@pytest.mark.parametrize("needs", [frozenset({Need.BYTES}), frozenset({Need.KV, Need.STATE})])
@pytest.mark.parametrize(("kv_bytes", "state_bytes"), [(0, 5), (5, 0), (0, 0)])
def test_what_costs_nothing_does_not_divide_by_it(needs: frozenset[Need], kv_bytes: int, state_bytes: int) -> None:
    costs = Costs(kv_bytes, state_bytes, float)
    rule = BestEviction(costs, Forecast(), needs)
    budget = JointBudget(100) if Need.BYTES in needs else SplitBudget(100, 100)
    held = BudgetCache(RadixTree(max_ghosts=30), Judicious(least_tokens=1), rule, costs, budget)
    for request in random_requests(1, 100):
        held.serve(request)
    assert all(rule.victim(need, 1e6) is not None for need in needs)


def test_nothing_is_evictable_where_nothing_is_held() -> None:
    assert BestEviction(COSTS, Forecast()).victim(Need.BYTES, 0.0) is None
