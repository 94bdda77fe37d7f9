"""Every missed prompt token has the cause that a history which forgets nothing gives it, and the sums are exact."""

import gc
import random
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import strategies as st

from marconi.model.latency import LatencyModel, require_lengths
from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Need, NodeView
from marconi.policy.causes import Cause
from marconi.policy.eviction.best import BestEviction, log2_worth
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.forecast.turns import Turns
from marconi.policy.host_tier import HostMemory, HostTier, LoadTimes
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.misses import Misses
from marconi.policy.request import Lease, Request, pack
from marconi.policy.residency import Place
from marconi.replay.admission.chunk_end import ExtraBuffer
from marconi.replay.pools import JointPool, TwoPools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import Kept, RadixTree, check_invariants
from rig.miss_oracle import MissOracle

from .random_runs import Extent, extents, random_ids, sources

COSTS = Costs(kv_bytes_per_token=3, state_bytes=40, flops=lambda num_tokens: num_tokens * (num_tokens + 10))
TWO_POOLS = frozenset({Need.KV, Need.STATE})
ALL = 10**9
"""Ghosts: as many as there are."""
LAYOUTS = ("two pools", "one pool", "host", "pages", "short of slots", "chunk ends")


class Seconds(LatencyModel):
    """A second for every token."""

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        return float(num_prompt_tokens - require_lengths(num_cached_tokens, num_prompt_tokens))

    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        return None


def server(layout: str, max_ghosts: int = ALL) -> ServerReplay:
    page = 4 if layout == "pages" else 1
    tree = RadixTree(page, max_ghosts, page)
    rule, pools, host = SeparateLru(TWO_POOLS), TwoPools(240, 30), None
    if layout == "short of slots":
        pools = TwoPools(2_000, 4)
    if layout == "host":
        times = LoadTimes(COSTS, Seconds().seconds, bytes_per_s=5.0)
        host = HostTier(tree, Order(SeparateLru(TWO_POOLS)), HostMemory(300, 8), times)
    if layout == "one pool":
        hybrid = HybridCache(tree, Judicious(page), Order(UtilityEviction(COSTS, 0.0, frozenset({Need.BYTES}))))
        return ServerReplay(hybrid, JointPool(1_000, 3, 40, page), Scheduling())
    if layout == "chunk ends":
        admission = ExtraBuffer(grid_tokens=8, interval_tokens=16, chunk_tokens=32)
        return ServerReplay(HybridCache(tree, admission, Order(rule)), pools, Scheduling.of(admission))
    return ServerReplay(
        HybridCache(tree, Judicious(page), Order(rule), 24, host=host), pools, Scheduling(chunk_tokens=32)
    )


def requests(source: random.Random | int, num_requests: int, num_namespaces: int = 1) -> Iterator[Request]:
    """Prompts of few ids that repeat, extend, cut and part from earlier ones."""
    rng = random.Random(source) if isinstance(source, int) else source  # noqa: S311 - test data
    past = [random_ids(rng, 60)]
    for number in range(num_requests):
        prompt = rng.choice(past)[: rng.randrange(1, 80)] + random_ids(rng, rng.randrange(0, 24), 4)
        prompt = prompt or [0]
        answer = random_ids(rng, rng.randrange(0, 12), 4)
        past = [*past[-12:], prompt + answer]
        length = len(prompt) + len(answer)
        namespace = rng.randrange(num_namespaces)
        yield Request(pack(prompt + answer), len(prompt), len(answer), length, float(number), namespace=namespace)


@extents
def test_every_cause_is_that_of_a_history_which_forgets_nothing(extent: Extent) -> None:
    def missed(layout: str, rng: random.Random, length: int, num_namespaces: int) -> int:
        replay = server(layout)
        oracle, num_prompt_tokens = MissOracle(replay.hybrid), 0
        for request in requests(rng, length, num_namespaces):
            replay.serve(request)
            num_prompt_tokens += request.num_prompt_tokens
            check_invariants(replay.hybrid.tree)
        counters = replay.hybrid.counters
        assert num_prompt_tokens == counters.num_hit_tokens + sum(counters.num_missed_tokens.values())
        del counters.num_missed_tokens[Cause.UNCACHED]
        assert oracle.num_requests >= length
        assert {cause: num for cause, num in counters.num_missed_tokens.items() if num} == oracle.missed
        return length

    extent.draw(missed, LAYOUTS, rng=sources, length=st.integers(30, 100), num_namespaces=st.sampled_from((1, 3)))


def test_runs_meet_every_cause_that_a_replay_has() -> None:
    met: Counter[Cause] = Counter()
    for layout in LAYOUTS:
        replay = server(layout)
        oracle = MissOracle(replay.hybrid)
        [*map(replay.serve, requests(1, 300, 2))]
        met += oracle.missed
    not_of_a_replay = {Cause.NOT_WRITTEN, Cause.HINT_OVER_LIMIT, Cause.UNCACHED}
    assert set(met) == set(Cause) - not_of_a_replay


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_flush_what_was_known_is_first_seen_since_then_and_counts_run_on(layout: str) -> None:
    flushed, replay = server(layout), server(layout)
    for request in requests(5, 100, 2):
        flushed.serve(request)
    replay.hybrid.succeed(flushed.hybrid, 30.0)
    oracle = MissOracle(replay.hybrid)
    first = max(requests(5, 20, 2), key=lambda request: request.num_prompt_tokens)
    explanation = replay.hybrid.begin(replay_lease(replay, first), 50.0)
    assert explanation is not None
    when = {miss.cause: miss.at_s for miss in explanation.misses}
    assert when == {Cause.FIRST_SEEN: 30.0, Cause.LAST_TOKEN: None}
    assert "first seen since the flush 20 s ago" in explanation.describe(50.0)
    for request in requests(5, 100, 2):
        replay.serve(request)
    assert oracle.num_requests == 101
    assert replay.hybrid.counters.num_requests == 201


def test_nothing_of_a_tree_is_kept_once_it_is_flushed() -> None:
    flushed, replay = server("two pools"), server("two pools")
    for request in requests(5, 20, 2):
        flushed.serve(request)
    replay.hybrid.succeed(flushed.hybrid, 30.0)
    tree = weakref.ref(flushed.hybrid.tree)
    del flushed
    gc.collect()
    assert tree() is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_that_forgets_takes_what_it_has_forgotten_for_first_seen_and_the_sums_stay_exact(layout: str) -> None:
    whole, short = server(layout), server(layout, max_ghosts=3)
    num_prompt_tokens = 0
    for request in requests(1, 120):
        whole.serve(request)
        short.serve(request)
        num_prompt_tokens += request.num_prompt_tokens
    missed = [replay.hybrid.counters.num_missed_tokens for replay in (whole, short)]
    assert missed[1][Cause.FIRST_SEEN] > missed[0][Cause.FIRST_SEEN]
    counters = short.hybrid.counters
    assert num_prompt_tokens == counters.num_hit_tokens + sum(counters.num_missed_tokens.values())


@pytest.mark.parametrize("layout", ["two pools", "host", "pages"])
def test_an_oracle_that_hears_of_no_eviction_disagrees(layout: str) -> None:
    replay = server(layout)
    oracle = MissOracle(replay.hybrid)
    replay.hybrid.evict_node = HybridCache.evict_node.__get__(replay.hybrid)  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        [*map(replay.serve, requests(0, 300))]
    assert oracle.num_requests < 300


def test_a_line_names_every_cause_with_its_tokens_and_age() -> None:
    replay = server("two pools")
    replay.serve(Request(pack([*range(100)]), 100, 0, 100, 0.0))
    request = Request(pack([*range(60), *range(500, 540)]), 100, 0, 100, 51.0)
    explanation = Misses(replay.hybrid.tree).explain(replay_lease(replay, request))
    assert explanation.describe(51.0) == (
        "hit 51 of 100; 9: diverged at token 60, no state kept; 39: first seen; 1: last token"
    )
    for number in range(2, 8):
        replay.serve(Request(pack([*range(100 * number, 100 * number + 100)]), 100, 0, 100, 10.0))
    again = Misses(replay.hybrid.tree).explain(replay_lease(replay, Request(pack([*range(100)]), 100, 0, 100, 51.0)))
    assert again.describe(51.0) == "hit 0 of 100; 99: state evicted 41 s ago for KV; 1: last token"
    (end, cause, at_s, _), last = again.parts
    instead = again._replace(parts=((end, cause, at_s, Kept(100, Place.PROMPT_END, 1.8)), last))
    assert instead.describe(51.0) == (
        "hit 0 of 100; 99: state evicted 41 s ago for KV, to keep a prompt's end at 100 tokens, worth 1.8 times as "
        "much; 1: last token"
    )
    assert instead.for_its_client().describe(51.0) == again.describe(51.0)
    assert again.num_missed_tokens() == {Cause.EVICTED_FOR_KV: 99, Cause.LAST_TOKEN: 1}


def test_where_states_stand_at_ends_of_chunks_the_rest_of_a_known_chunk_is_rounding() -> None:
    replay = server("chunk ends")
    for seconds in (0.0, 1.0):
        replay.serve(Request(pack([*range(100)]), 100, 0, 100, seconds))
    explanation = Misses(replay.hybrid.tree).explain(
        replay_lease(replay, Request(pack([*range(61), *range(500, 510)]), 71, 0, 71, 2.0)), 8
    )
    assert explanation.describe(2.0) == (
        "hit 32 of 71; 24: diverged at token 61, no state kept; 5: known, less than a chunk; 9: first seen; "
        "1: last token"
    )


def test_what_was_kept_instead_is_remembered_through_splits_and_merges() -> None:
    tree = RadixTree(max_ghosts=9)
    hybrid = HybridCache(tree, Judicious(), Order(BestEviction(COSTS, Forecast(Turns(1)), TWO_POOLS)))

    def left(ids: list[int], depths: list[int], now_s: float) -> None:
        request = Request(pack(ids), len(ids), 0, len(ids), now_s)
        hybrid.insert(Lease(request, hybrid.match(request)), depths, now_s)

    left([*range(100)], [30, 60, 100], 1.0)
    left([*range(500, 520)], [20], 4.0)
    assert hybrid.evict(Need.STATE, 5.0) is not None

    def kept() -> list[Kept]:
        nodes = (node for root in tree.roots.values() for node in root.walk())
        return [absence.kept for node in nodes for absence in node.absences or () if absence.kept is not None]

    (expected,) = kept()
    assert expected.num_times >= 1.0
    left([*range(20), 7, 7], [22], 6.0)  # splits the span that was merged
    assert expected in kept()
    for _ in range(3):
        assert hybrid.evict(Need.KV, 7.0) is not None
    hybrid.check_invariants()
    assert expected in kept()


def test_what_was_kept_instead_is_what_the_rule_ranks_behind_the_victim() -> None:
    eviction = BestEviction(COSTS, Forecast(Turns(1)), TWO_POOLS)
    hybrid = HybridCache(RadixTree(1, ALL), Judicious(), Order(eviction))
    replay, num_compared = ServerReplay(hybrid, TwoPools(240, 30), Scheduling()), 0
    kept_instead, forecast = eviction.kept_instead, eviction.forecast

    def worth(node: NodeView, need: Need) -> float:
        held = eviction._classes[need].class_of(node)
        assert held is not None
        return float(log2_worth(forecast.log2_index[held[0]], held[1], forecast.now_s - node.last_hit_s))

    def compared(victim: NodeView, need: Need) -> tuple[NodeView, float] | None:
        nonlocal num_compared
        before = list(eviction._classes[need]._worths)
        found = kept_instead(victim, need)
        assert (kept_instead(victim, need), eviction._classes[need]._worths) == (found, before), "asking changes it"
        own = eviction._classes[need].class_of(victim)
        others = [each for key, each in eviction._classes[need]._classes.items() if key != own]
        worths = sorted(worth(each.entries[0][2], need) for each in others if each.entries)
        if not worths:
            assert found is None
        elif found is not None:  # or the victim is the youngest of its class
            node, num_times = found
            assert worth(node, need) == pytest.approx(worths[0])
            assert num_times == pytest.approx(2.0 ** (worths[0] - worth(victim, need)))
            num_compared += 1
        return found

    eviction.kept_instead = compared  # type: ignore[method-assign]
    for request in requests(2, 250):
        replay.serve(request)
        hybrid.check_invariants()
    assert num_compared > 100


def replay_lease(replay: ServerReplay, request: Request) -> Lease:
    return Lease(request, replay.hybrid.match(request))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_explanations_the_same_is_cached_and_evicted_and_nothing_is_noted(layout: str) -> None:
    explains, silent = server(layout), server(layout)
    silent.hybrid.misses = None
    if isinstance(silent.hybrid.host, HostTier):
        silent.hybrid.host.explains = False
    for request in requests(3, 100, 2):
        assert silent.serve(request) == explains.serve(request)
    counters, expected = silent.hybrid.counters, explains.hybrid.counters
    assert not any(counters.num_missed_tokens.values())
    assert any(expected.num_missed_tokens.values())
    assert replace(counters, counted={}) == replace(expected, counted={})
    for root in silent.hybrid.tree.roots.values():
        assert not any(node.absences for node in root.walk())
    silent.hybrid.succeed(explains.hybrid, 0.0)
    assert silent.hybrid.misses is None
