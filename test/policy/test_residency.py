"""Stays of states: watched by a cache's watchers, and equal to what a list of all events says."""

from collections import defaultdict

import numpy as np
import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Need
from marconi.policy.eviction.best import BestEviction
from marconi.policy.eviction.order import Order
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.forecast.turns import Turns
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.residency import Place, Stay, gap_s, place_of, stay_of
from marconi.replay.pools import Pools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import Kept, LeftBy, Node, RadixTree
from policy.test_misses import COSTS, LAYOUTS, TWO_POOLS, requests, server


class Log:
    """A watcher that believes what it is shown of a node, and keeps times of its own beside it."""

    def __init__(self) -> None:
        self.stays: list[Stay] = []
        self.uses_s: defaultdict[int, list[float]] = defaultdict(list)
        self.gaps: list[float] = []

    def resuming(self, node: Node, now_s: float) -> None:
        self.gaps.append(gap_s(node, now_s))
        assert gap_s(node, now_s) <= now_s - max(self.uses_s[node.serial], default=0.0)
        self.uses_s[node.serial].append(now_s)

    def evicting(self, node: Node, need: Need, now_s: float, kept: Kept | None) -> None:
        stay = stay_of(node, now_s)
        assert 0.0 <= stay.idle_s <= stay.lifetime_s
        assert stay.is_unused == (not self.uses_s[node.serial])
        self.stays.append(stay)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_use_and_every_eviction_is_seen_once(layout: str) -> None:
    replay, log = server(layout), Log()
    replay.hybrid.watchers += (log,)
    for request in requests(3, 400):
        replay.serve(request)
    counters = replay.hybrid.counters
    assert len(log.gaps) == counters.num_states_hit > 0
    assert len(log.stays) == sum(counters.num_evictions.values()) > 0
    assert sum(stay.is_unused for stay in log.stays) == counters.num_evictions_unused
    assert {stay.place for stay in log.stays} >= {Place.PROMPT_END, Place.ANSWER_END}


def test_a_place_is_by_what_goes_on_and_by_who_left_the_state() -> None:
    replay = server("two pools")
    prompt, *_ = requests(0, 1)
    replay.serve(prompt)
    places = {node.depth: place_of(node) for node in replay.hybrid.tree.nodes() if node.has_state}
    end = prompt.num_processed_tokens
    assert places[end] is (Place.ANSWER_END if prompt.num_output_tokens > 1 else Place.PROMPT_END)
    assert places[prompt.num_prompt_tokens - 1] is Place.PROMPT_END


def test_watchers_go_over_to_the_cache_that_takes_the_place_of_a_flushed_one() -> None:
    first, second, log = server("two pools"), server("two pools"), Log()
    first.hybrid.watchers += (log,)
    second.hybrid.succeed(first.hybrid)
    assert second.hybrid.watchers == (log,)


def learning_server() -> ServerReplay:
    rule = BestEviction(COSTS, Forecast(Turns()), TWO_POOLS)
    hybrid = HybridCache(RadixTree(1, 1_000, 1), Judicious(1), Order(rule), 24, turns=rule.turns)
    return ServerReplay(hybrid, Pools(240, 30), Scheduling(chunk_tokens=32))


def test_what_is_learned_of_the_traffic_outlives_a_flush() -> None:
    """And nothing of single states does: a new tree counts its nodes anew."""
    first, second, other = (learning_server() for _ in range(3))
    for request in requests(3, 400):
        first.serve(request)
    second.hybrid.succeed(first.hybrid)
    learned, taken_over, prior = (replay.hybrid.order.rule for replay in (first, second, other))
    assert isinstance(learned, BestEviction)
    assert isinstance(taken_over, BestEviction)
    assert isinstance(prior, BestEviction)
    assert np.array_equal(taken_over.forecast.index, learned.forecast.index)
    assert not np.array_equal(prior.forecast.index, learned.forecast.index), "the control"
    assert taken_over.guard is not None
    assert taken_over.guard.gain_tokens == learned.guard.gain_tokens  # type: ignore[union-attr]
    left_by = LeftBy(100, went_on=False)
    shares = [replay.hybrid.turns.share(left_by, 100, None) for replay in (first, second, other)]
    assert shares[0] == shares[1] != shares[2]
    assert all(taken_over.forecast._lives.stratum(serial) is None for serial in range(10_000))
    for request in requests(4, 200):
        second.serve(request)
    second.hybrid.check_invariants()
