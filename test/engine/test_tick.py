"""Ticks: when there is one, which way it is sent, and what a cache follows afterwards."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt.session import session_controller

from marconi.engine.cache import tick
from marconi.engine.cache.tick import FirstRank, RequestClock, Tick, TickReceiver


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Cache:
    """What a receiver knows of a cache."""

    def __init__(self, first_rank: FirstRank | None) -> None:
        self.first_rank = first_rank
        self.adopted: list[Tick] = []

    def adopt(self, made: Tick) -> None:
        self.adopted.append(made)

    def clock(self) -> float:
        return self.adopted[-1].now_s


class Channel:
    """SGLang's receiver of one rank: gives what came, and what this rank brings itself."""

    def __init__(self, *came: Any, skips: bool = False) -> None:
        self.came, self.skips = came, skips
        self.asked: list[Any] = []

    def recv_requests(self, local_reqs: list[Any] | None = None) -> list[Any]:
        self.asked.append(local_reqs)
        return [] if self.skips else [*self.came, *(local_reqs or ())]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def flops(num_tokens: int) -> float:
    return float(num_tokens)


def test_ticks_are_ten_milliseconds_apart_or_more(clock: Clock) -> None:
    first = FirstRank(clock, flops)
    times = []
    for _ in range(100):
        if (made := first.due()) is not None:
            times.append(made.now_s)
        clock.now_s += 0.003
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert min(gaps) >= tick.INTERVAL_S
    assert max(gaps) < 0.0125, "and one is made as soon as it may be"


def test_by_requests_time_stands_still_between_them_and_no_prefill_is_timed() -> None:
    first, run = FirstRank(RequestClock(), flops), SimpleNamespace(began_s=None)
    first.tick(0.0)
    assert first.due() is None
    first.began(run)  # type: ignore[arg-type]
    assert first.due() == Tick(0.25)
    assert first.due() is None
    assert run.began_s is None


def test_a_tick_rides_with_what_is_local_and_is_taken_out(clock: Clock) -> None:
    cache, channel = Cache(FirstRank(clock, flops)), Channel("a request")
    receiver = TickReceiver(channel, cache)
    assert receiver.recv_requests(local_reqs=["an abort"]) == ["a request", "an abort"]
    assert cache.adopted == [Tick(100.0)]
    assert channel.asked == [["an abort", Tick(100.0)]], "one broadcast, SGLang's own"
    assert receiver.recv_requests(local_reqs=["an abort"]) == ["a request", "an abort"]
    assert channel.asked[1] == ["an abort"], "none is due yet"


def test_another_rank_adopts_what_comes_and_brings_nothing() -> None:
    cache, channel = Cache(None), Channel("a request", Tick(7.0, 0.1, 0.2))
    receiver = TickReceiver(channel, cache)
    assert receiver.recv_requests() == ["a request"]
    assert cache.adopted == [Tick(7.0, 0.1, 0.2)]
    assert channel.asked == [None]


def test_a_pass_that_receives_nothing_adopts_nothing(clock: Clock) -> None:
    """`--scheduler-recv-interval`: SGLang skips the broadcast, and time stands still for a pass."""
    cache = Cache(FirstRank(clock, flops))
    assert TickReceiver(Channel(skips=True), cache).recv_requests(local_reqs=[]) == []
    assert cache.adopted == []


def test_a_scheduler_with_a_cache_of_sglangs_own_is_left_alone() -> None:
    scheduler = SimpleNamespace(tree_cache=object(), request_receiver=(own := Channel()))
    tick.after_init_request_receiver(None, scheduler)
    assert scheduler.request_receiver is own


def test_sessions_time_out_by_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not by the clock of each rank."""
    monkeypatch.setattr(session_controller, "time", session_controller.time)
    cache = Cache(None)
    cache.adopt(Tick(50.0))
    scheduler = SimpleNamespace(tree_cache=cache, request_receiver=Channel())
    tick.after_init_request_receiver(None, scheduler)
    session = session_controller.Session(10, "a", timeout=5.0)
    cache.adopt(Tick(54.0))
    assert not session.is_timed_out()
    cache.adopt(Tick(56.0))
    assert session.is_timed_out()


@pytest.mark.parametrize(("tree_cache", "expected"), [(SimpleNamespace(clock=lambda: 3.0), 3.0), (object(), 8.0)])
def test_sessions_are_looked_through_at_the_ticks_time(tree_cache: Any, expected: float) -> None:
    seen: list[tuple[float, float]] = []
    reap: Callable[..., None] = lambda _controller, now, interval: seen.append((now, interval))  # noqa: E731
    tick.around_maybe_reap(reap, SimpleNamespace(tree_cache=tree_cache), 8.0)
    assert seen == [(expected, 1.0)]
