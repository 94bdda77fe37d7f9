"""The tuner beside a live cache, in line."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest

from marconi.policy.eviction.base import Eviction
from marconi.policy.request import Request
from marconi.replay.server import ServerReplay
from marconi.tree.snapshot import TreeSnapshot
from marconi.tuning import (
    LRU,
    Decision,
    InlineWorkers,
    Schedule,
    Setup,
    Trial,
    TunableTree,
    Tuner,
    Window,
    Workers,
)

from . import traffic

SCHEDULE = Schedule(grid=(0.0, 0.5, 2.0, 8.0, 32.0), min_requests=100, max_requests=200)


class Counted(TunableTree):
    """Notes after how many requests it was asked for a snapshot, and every value that it was given."""

    def __init__(self, cache: ServerReplay) -> None:
        super().__init__(cache.served, partial(setattr, cache.served.tiers.rule, "weight"))
        self.cache = cache
        self.snapshots: list[int] = []
        self.values: list[float] = []

    def snapshot(self) -> TreeSnapshot:
        self.snapshots.append(self.cache.counters.num_requests)
        return super().snapshot()

    def apply(self, value: float) -> None:
        self.values.append(value)
        super().apply(value)


def serve(
    requests: list[Request],
    schedule: Schedule = SCHEDULE,
    setup: Setup | None = None,
    workers: Workers | None = None,
) -> tuple[Counted, Tuner, list[Decision]]:
    live = Counted(traffic.new_cache())
    tuner = Tuner(live, setup or traffic.setup(), workers or InlineWorkers(), schedule)
    decisions = []
    for request in requests:
        live.cache.serve(request)
        tuner.observe(request)
        if (decision := tuner.poll()) is not None:
            decisions.append(decision)
    return live, tuner, decisions


def test_where_flops_per_byte_pay_a_value_is_adopted_and_wins() -> None:
    stream = traffic.documents_under_chatter(1, 3000)
    live, tuner, decisions = serve(stream)
    assert tuner.value > 0
    assert live.cache.counters.num_hit_tokens > 1.2 * traffic.num_hit_tokens(traffic.new_cache(), stream)
    adopted = next(decision for decision in decisions if decision.value != LRU)
    assert adopted.scores[adopted.value] > adopted.scores[LRU]


def test_where_they_do_not_lru_stays() -> None:
    stream = traffic.chats_under_long_reads(1, 3000)
    live, tuner, decisions = serve(stream)
    assert decisions
    assert tuner.value == LRU
    assert live.values == [LRU]
    assert live.cache.counters.num_hit_tokens == traffic.num_hit_tokens(traffic.new_cache(), stream)


def test_when_traffic_moves_on_the_value_follows() -> None:
    first = traffic.documents_under_chatter(1, 2000)
    second = traffic.chats_under_long_reads(2, 3000, first_s=2000.0)
    _, tuner, decisions = serve(first + second)
    assert max(decision.value for decision in decisions if decision.num_requests <= 2000) > LRU
    assert tuner.value == LRU


def test_nothing_is_adopted_that_its_own_window_says_is_worse_than_lru() -> None:
    _, _, decisions = serve(
        traffic.documents_under_chatter(1, 1500) + traffic.chats_under_long_reads(2, 1500, first_s=1500.0)
    )
    assert len(decisions) > 10
    assert any(decision.value != LRU for decision in decisions)
    assert all(decision.scores[decision.value] >= decision.scores[LRU] for decision in decisions)


class GoodReference(InlineWorkers):
    """The reference scores one more than it did."""

    def submit(self, window: Window, setup: Setup, values: Sequence[float | None]) -> list[Future[list[Trial]]]:
        (future,) = super().submit(window, setup, values)
        better: Future[list[Trial]] = Future()
        better.set_result([Trial(value, score + (value is None)) for value, score in future.result()])
        return [better]


def test_no_value_is_adopted_while_the_reference_beats_all_of_them() -> None:
    stream = traffic.documents_under_chatter(1, 3000)
    assert serve(stream)[1].value > LRU
    _, tuner, decisions = serve(stream, workers=GoodReference())
    assert len(decisions) > 10
    assert tuner.value == LRU
    assert {decision.value for decision in decisions} == {LRU}


def test_no_adopted_value_is_below_joint_lru_in_its_own_window() -> None:
    _, _, decisions = serve(
        traffic.documents_under_chatter(1, 1500) + traffic.chats_under_long_reads(2, 1500, first_s=1500.0)
    )
    adopted = [decision for decision in decisions if decision.value != LRU]
    assert adopted
    for decision in adopted:
        assert decision.reference_score is not None
        assert decision.scores[decision.value] >= decision.reference_score


def test_lru_runs_until_memory_was_short_and_windows_follow_each_other() -> None:
    stream = traffic.documents_under_chatter(1, 1000)
    untouched = traffic.new_cache()
    num_bootstrap = next(
        index for index, request in enumerate(stream, 1) if untouched.serve(request) >= 0 and evicted(untouched)
    )
    live, _, decisions = serve(stream, replace(SCHEDULE, bootstrap_multiple=3.0, max_requests=1000))
    length = max(100, 3 * num_bootstrap)
    assert live.snapshots[:3] == [num_bootstrap, num_bootstrap + length, num_bootstrap + 2 * length]
    # In line, trials are over at once and picked up at the next poll.
    assert [decision.num_requests for decision in decisions[:2]] == [depth + 1 for depth in live.snapshots[1:3]]


def evicted(cache: ServerReplay) -> bool:
    return any(cache.counters.num_evictions.values())


def test_a_cache_that_never_evicts_is_left_alone() -> None:
    live, _, decisions = serve(traffic.documents_under_chatter(1, 10))
    assert not decisions
    assert not live.snapshots


def test_the_same_requests_give_the_same_decisions() -> None:
    stream = traffic.documents_under_chatter(4, 1500)
    assert serve(stream)[2] == serve(stream)[2]


def test_a_window_ends_early_when_its_paths_grow_large() -> None:
    stream = traffic.documents_under_chatter(1, 400)
    live, _, _ = serve(stream, replace(SCHEDULE, max_path_bytes=40 * len(stream[1].path)))
    assert 0 < live.snapshots[1] - live.snapshots[0] < 40


class Broken:
    """A factory of rules that fails for some windows."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures

    def __call__(self, value: float) -> Eviction:
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("no rule today")
        return traffic.utility(value)


def test_trials_that_fail_are_told_and_cost_their_window_only() -> None:
    stream = traffic.documents_under_chatter(1, 3000)
    live, tuner, decisions = serve(stream, setup=replace(traffic.setup(), eviction=Broken(num_failures=3)))
    assert [decision.failure for decision in decisions[:4]] == ["RuntimeError: no rule today"] * 3 + [""]
    assert all(decision.value == LRU and not decision.scores for decision in decisions[:3])
    assert tuner.value > LRU
    assert live.cache.counters.num_requests == 3000


def test_the_reference_rule_is_told_beside_the_values() -> None:
    _, _, decisions = serve(traffic.chats_under_long_reads(1, 600))
    assert all(decision.reference_score is not None and decision.reference_score > 0 for decision in decisions)
    _, _, decisions = serve(traffic.chats_under_long_reads(1, 600), setup=replace(traffic.setup(), reference=None))
    assert decisions[0].reference_score is None


def test_any_parameter_of_any_rule_can_be_tuned() -> None:
    """`limit` of a rule of its own: 0 is LRU, more evicts deep nodes first."""
    stream = traffic.chats_under_long_reads(1, 1500)
    given: list[float] = []

    class Live(TunableTree):
        def apply(self, value: float) -> None:
            given.append(value)

    cache = traffic.new_cache()
    made: list[float] = []

    def family(value: float) -> Eviction:
        made.append(value)
        return traffic.utility(0.0)

    setup = Setup(family, traffic.setup().cache)
    tuner = Tuner(Live(cache.served, given.append), setup, InlineWorkers(), replace(SCHEDULE, grid=(0.0, 3.0)))
    for request in stream:
        cache.serve(request)
        tuner.observe(request)
        tuner.poll()
    assert set(made) == {0.0, 3.0}
    assert given == [LRU]


def test_after_closing_the_last_value_stays_and_nothing_is_tried() -> None:
    stream = traffic.documents_under_chatter(1, 3000)
    live, tuner, _ = serve(stream[:2000])
    value, num_snapshots = tuner.value, len(live.snapshots)
    tuner.close()
    for request in stream[2000:]:
        live.cache.serve(request)
        tuner.observe(request)
        assert tuner.poll() is None
    assert tuner.value == value > LRU
    assert len(live.snapshots) == num_snapshots


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(grid=(0.5, 1.0)), "without 0.0"),
        (lambda: Schedule(grid=(0.0, -1.0)), "a value of the grid must be a finite number, 0 or more, got -1.0"),
        (lambda: Schedule(caution=float("nan")), "caution must be a finite number, 0 or more, got nan"),
        (lambda: Schedule(margin=1.5), "margin must be a share .*, got 1.5"),
        (lambda: Schedule(bootstrap_multiple=0.0), "bootstrap_multiple must be a finite number above 0, got 0.0"),
        (lambda: Schedule(num_remembered=0), "num_remembered must be 1 or more, got 0"),
        (lambda: Schedule(min_requests=10, max_requests=5), "max_requests is 5"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(make: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
