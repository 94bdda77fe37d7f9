"""Stays of states: watched by a cache's watchers, and equal to what a list of all events says."""

from collections import defaultdict

import pytest

from marconi.policy.base import Need
from marconi.policy.residency import Place, Stay, gap_s, place_of, stay_of
from marconi.tree import Kept, Node
from policy.test_misses import LAYOUTS, requests, server


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
    second.hybrid.succeed(first.hybrid, 0.0)
    assert second.hybrid.watchers == (log,)
