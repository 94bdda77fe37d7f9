"""Queueing replay: times worked by hand, locks, conservation, and agreement with serial replay."""

from dataclasses import replace

import pytest

from marconi.policy.base import Costs, Need
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Request, Trace
from marconi.replay import queueing, serial
from marconi.replay.admission.chunk_end import NoBuffer
from marconi.replay.pools import JointPool, TwoPools
from marconi.replay.queueing import Batching
from marconi.replay.server import ReplayedRequest, ServerReplay
from marconi.tree import Node, check_invariants
from marconi_lab.block.server import BlockServer

from . import worlds
from .worlds import SPEED, SecondAToken, request, trace


class WatchedRun:
    """A run that is noted when it begins and finishes, and whether the state in use was there to the end."""

    def __init__(self, watched: "Watched", run: ReplayedRequest, request: Request) -> None:
        self._watched, self._run, self._request = watched, run, request

    def __getattr__(self, name: str) -> object:
        return getattr(self._run, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "now_s":
            self._run.now_s = value  # type: ignore[assignment]
        else:
            super().__setattr__(name, value)

    def finish(self) -> None:
        watched = self._watched
        held: Node | None = self._run._held
        watched.num_lost += held is not None and not held.has_state
        watched.finished.append((self._request, self._run.now_s))
        watched.num_running -= 1
        self._run.finish()
        watched.check_memory()


class Watched(ServerReplay):
    """Notes when requests begin and finish."""

    def __init__(self, like: ServerReplay) -> None:
        super().__init__(like.hybrid, like.pools, like.scheduling)
        self.began: list[tuple[Request, float]] = []
        self.finished: list[tuple[Request, float]] = []
        self.num_lost = 0
        self.num_running = self.most_running = 0

    def run(self, request: Request, now_s: float) -> ReplayedRequest:
        self.began.append((request, now_s))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        run = super().run(request, now_s)
        self.check_memory()
        return WatchedRun(self, run, request)  # type: ignore[return-value]

    def check_memory(self) -> None:
        """What is free is not less than nothing."""
        assert self.pools.num_free_tokens >= 0
        assert self.pools.num_free_slots >= 0


def ends(watched: Watched) -> list[float]:
    return [now_s for _, now_s in watched.finished]


def replay(what: Trace, cache: ServerReplay, batching: Batching | None = None) -> list[float]:
    return queueing.replay(what, cache, SPEED, batching or Batching()).ttft_s


def test_a_request_waits_for_the_prefill_before_it() -> None:
    cache = Watched(worlds.server())
    assert replay(trace(request("abcd", "e", 0.0), request("vwxy", "z", 1.0)), cache) == [4.0, 7.0]
    assert ends(cache) == [4.0, 8.0]


def test_a_prefill_goes_before_decoding_and_after_the_step_that_runs() -> None:
    cache = Watched(worlds.server())
    # Prefill 0..4, a step 4..5, then the newcomer's prefill 5..7, and the last step of the first 7..8.
    assert replay(trace(request("abcd", "efg", 0.0), request("xy", "z", 4.5)), cache) == [4.0, 2.5]
    assert cache.finished == [(cache.began[1][0], 7.0), (cache.began[0][0], 8.0)]


def test_a_state_is_hit_once_the_request_that_leaves_it_has_finished() -> None:
    first, second = request("abcd", "efg", 0.0), request("abcdefgh", "i", 6.0)
    outcome = queueing.replay(trace(first, second), worlds.server(), SPEED, Batching())
    assert outcome.hit_tokens == [0, 6]
    assert outcome.ttft_s == [4.0, 2.0]


def test_requests_that_arrive_together_are_prefilled_together_up_to_the_limit() -> None:
    three = trace(*(request(prompt, "o", 0.0) for prompt in ("abc", "def", "ghi")))
    assert replay(three, worlds.server()) == [9.0, 9.0, 9.0]
    assert replay(three, worlds.server(), Batching(max_prefill_tokens=6)) == [6.0, 6.0, 9.0]


def test_no_more_run_than_may() -> None:
    what = trace(*(request(f"{letter}123", "98765", 0.0) for letter in "abcdef"))
    cache = Watched(worlds.server())
    replay(what, cache, Batching(max_running=2))
    assert cache.most_running == 2


def test_a_request_waits_until_the_memory_of_one_that_runs_is_free() -> None:
    """At 4 s the first has its prompt, a slot and a state, and needs 7 tokens, one beyond and a state for its end.

    The other needs 3, one beyond, a slot and a state: 24 bytes beside 24 and 18.
    """
    what = trace(request("abcd", "efghijkl", 0.0), request("uvw", "x", 1.0))
    assert replay(what, worlds.server(66)) == [4.0, 6.0]
    # Prefill to 4, seven steps to 11, then three tokens.
    assert replay(what, worlds.server(65)) == [4.0, 13.0]


PRESSED = trace(
    request("abcdefgh", "ij", 0.0),
    request("abcdefghijkl", "0123456789" * 3, 20.0),  # starts from 9 tokens and runs for half a minute
    *(request(chr(200 + n) * 12, "..", 24.0 + 4 * n) for n in range(6)),  # others, short of memory beside it
)
PRESSED_BYTES = 160


def test_a_state_in_use_is_never_evicted() -> None:
    cache = Watched(worlds.server(PRESSED_BYTES))
    replay(PRESSED, cache)
    assert cache.counters.num_evictions[Need.BYTES] > 0
    assert cache.counters.num_states_hit == 1
    assert cache.num_lost == 0


def test_without_locks_the_state_in_use_would_be_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its request leaves then has nothing to go on from."""
    cache = Watched(worlds.server(PRESSED_BYTES))
    monkeypatch.setattr(cache.hybrid.tree, "lock", lambda node: None)
    monkeypatch.setattr(cache.hybrid.tree, "unlock", lambda node: None)
    monkeypatch.setattr(cache, "check_memory", lambda: None)
    with pytest.raises(AssertionError):
        replay(PRESSED, cache)


MEMORIES: dict[str, TwoPools | int] = {
    "plenty": 1 << 40,
    "short": 400,
    "a-few": 90,
    "none": 3,
    "two-pools": TwoPools(200, 9),
    "two-short-pools": TwoPools(60, 4),
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("gap_s", [0.0, 1.0, 30.0])
def test_every_request_that_fits_begins_and_finishes_exactly_once(memory: str, gap_s: float) -> None:
    what = worlds.conversations(gap_s=gap_s)
    pools = MEMORIES[memory]
    pools = JointPool(pools, 1, worlds.STATE_BYTES) if isinstance(pools, int) else replace(pools)
    cache = Watched(worlds.server(pools, SeparateLru(frozenset({pools.kv_need, pools.state_need}))))
    ttft_s = replay(what, cache)
    fitting = [each for each in what.requests if cache.fits(each)]
    assert sorted(map(id, (each for each, _ in cache.began))) == sorted(map(id, fitting))
    assert sorted(map(id, (each for each, _ in cache.finished))) == sorted(map(id, fitting))
    assert ends(cache) == sorted(ends(cache))
    assert all(seconds > 0 for seconds in ttft_s)
    cache.check_invariants()
    check_invariants(cache.hybrid.tree)
    assert not any(node.num_locks for node in cache.hybrid.tree.nodes())
    assert cache.counters.num_requests + cache.counters.num_too_large == len(what.requests)


def test_requests_run_beside_each_other_in_short_memory() -> None:
    cache = Watched(worlds.server(400))
    replay(worlds.conversations(gap_s=1.0), cache)
    assert cache.most_running > 1
    assert cache.counters.num_evictions[Need.BYTES] > 10


def test_requests_that_never_meet_hit_what_they_hit_in_series() -> None:
    what = worlds.conversations(gap_s=1e4)
    one, other = worlds.server(), worlds.server()
    in_series = serial.replay(what, one, SecondAToken())
    queued = queueing.replay(what, other, SPEED, Batching())
    assert sum(in_series.hit_tokens) > 0
    assert queued.hit_tokens == in_series.hit_tokens
    assert queued.ttft_s == pytest.approx(in_series.ttft_s)
    assert one.held == other.held


GROUP = trace(*(request("s" * 40 + letter * 8, "o", 0.0) for letter in "abcd"))


def test_of_prompts_that_arrive_together_the_first_leaves_a_state_where_the_others_go_on() -> None:
    """The first takes 48 s, the others 8 each from the end of what all share."""
    outcome = queueing.replay(GROUP, worlds.server(), SPEED, Batching())
    assert outcome.hit_tokens == [0, 40, 40, 40]
    assert outcome.ttft_s == [48.0, 72.0, 72.0, 72.0]


def test_an_admission_that_does_not_look_at_the_queue_computes_all_of_them() -> None:
    cache = worlds.server(admission=NoBuffer())
    assert queueing.replay(GROUP, cache, SPEED, Batching()).hit_tokens == [0, 0, 0, 0]


def test_who_shares_too_little_does_not_wait_and_others_are_not_held_up() -> None:
    """Two that share 40 tokens, and between them one that shares none: it goes with the first."""
    alike = [request("s" * 40 + letter * 8, "o", 0.0) for letter in "ab"]
    outcome = queueing.replay(
        trace(alike[0], request("x" * 10, "o", 0.0), alike[1]), worlds.server(), SPEED, Batching()
    )
    assert outcome.hit_tokens == [0, 0, 40]
    assert outcome.ttft_s == [58.0, 58.0, 66.0]
    little = trace(*(request("s" * 20 + letter * 8, "o", 0.0) for letter in "ab"))
    assert queueing.replay(little, worlds.server(), SPEED, Batching()).hit_tokens == [0, 0]


def test_a_block_cache_is_refused() -> None:
    server = BlockServer("lru-block", 100, 2, Costs(1, 0, float))
    with pytest.raises(ValueError, match="--mode must be serial"):
        queueing.replay(worlds.conversations(unit_tokens=2), server, SPEED, Batching())


@pytest.mark.parametrize("limit", ["max_running", "max_prefill_tokens"])
def test_a_limit_of_nothing_is_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=f"{limit} must be 1 or more, got 0"):
        Batching(**{limit: 0})


def awaited_hit(monkeypatch: pytest.MonkeyPatch, *, knows_the_queue: bool) -> int:
    """Hit tokens of a prompt whose state is the oldest held, where one that goes before it needs memory."""
    if not knows_the_queue:
        monkeypatch.setattr(HybridCache, "queue", lambda *_: None)
    older, newer = request("a" * 40, "", 0.0), request("b" * 40, "", 100.0)
    other, awaited = request("c" * 60, "", 200.0), request("a" * 40 + "d", "", 200.0)
    cache = worlds.server(150)
    outcome = queueing.replay(trace(older, newer, other, awaited), cache, SPEED, Batching(max_running=1))
    assert cache.counters.num_evictions[Need.BYTES] > 0
    return outcome.hit_tokens[3]


def test_what_a_waiting_request_would_start_from_is_evicted_last(monkeypatch: pytest.MonkeyPatch) -> None:
    assert awaited_hit(monkeypatch, knows_the_queue=True) == 40


def test_without_the_queue_it_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    assert awaited_hit(monkeypatch, knows_the_queue=False) == 0
