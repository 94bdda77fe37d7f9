"""Queueing replay: times worked by hand, locks, conservation, and agreement with serial replay."""

import pytest
from marconi.policy.cache import JointBudget, Lease, SplitBudget
from marconi.replay.policies.cache import ReplayCache

from marconi.policy.admission.chunk_end import NoBuffer
from marconi.policy.eviction.base import Costs, Need
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.request import Request, Trace
from marconi.replay import queueing, serial
from marconi.replay.policies import Subject
from marconi.replay.policies.block import BlockServer
from marconi.replay.queueing import Batching
from marconi.tree import check_invariants

from . import worlds
from .worlds import SPEED, SecondAToken, request, trace


class Watched(ReplayCache):
    """Notes when requests begin and finish, and whether the states that they started from lasted as long."""

    def __init__(self, like: ReplayCache) -> None:
        super().__init__(like.tree, like.admission, like.eviction, like.costs, like.budget)
        self.began: list[tuple[Request, float]] = []
        self.finished: list[tuple[Request, float]] = []
        self.num_lost = 0
        self.num_running = self.most_running = 0

    def begin(self, request: Request, now_s: float) -> Lease:
        self.began.append((request, now_s))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        return super().begin(request, now_s)

    def finish(self, lease: Lease, now_s: float) -> None:
        source = lease.match.checkpoint
        self.num_lost += source.parent is not None and not source.has_state
        self.finished.append((lease.request, now_s))
        self.num_running -= 1
        super().finish(lease, now_s)


def ends(watched: Watched) -> list[float]:
    return [now_s for _, now_s in watched.finished]


def replay(what: Trace, cache: ReplayCache, batching: Batching | None = None) -> list[float]:
    return queueing.replay(what, Subject(cache), SPEED, batching or Batching()).ttft_s


def test_a_request_waits_for_the_prefill_before_it() -> None:
    cache = Watched(worlds.cache())
    assert replay(trace(request("abcd", "e", 0.0), request("vwxy", "z", 1.0)), cache) == [4.0, 7.0]
    assert ends(cache) == [4.0, 8.0]


def test_a_prefill_goes_before_decoding_and_after_the_step_that_runs() -> None:
    cache = Watched(worlds.cache())
    # Prefill 0..4, a step 4..5, then the newcomer's prefill 5..7, and the last step of the first 7..8.
    assert replay(trace(request("abcd", "efg", 0.0), request("xy", "z", 4.5)), cache) == [4.0, 2.5]
    assert cache.finished == [(cache.began[1][0], 7.0), (cache.began[0][0], 8.0)]


def test_a_state_is_hit_once_the_request_that_leaves_it_has_finished() -> None:
    first, second = request("abcd", "efg", 0.0), request("abcdefgh", "i", 6.0)
    outcome = queueing.replay(trace(first, second), Subject(worlds.cache()), SPEED, Batching())
    assert outcome.hit_tokens == [0, 6]
    assert outcome.ttft_s == [4.0, 2.0]


def test_requests_that_arrive_together_are_prefilled_together_up_to_the_limit() -> None:
    three = trace(*(request(prompt, "o", 0.0) for prompt in ("abc", "def", "ghi")))
    assert replay(three, worlds.cache()) == [9.0, 9.0, 9.0]
    assert replay(three, worlds.cache(), Batching(max_prefill_tokens=6)) == [6.0, 6.0, 9.0]


def test_no_more_run_than_may() -> None:
    what = trace(*(request(f"{letter}123", "98765", 0.0) for letter in "abcdef"))
    cache = Watched(worlds.cache())
    replay(what, cache, Batching(max_running=2))
    assert cache.most_running == 2


def test_a_request_waits_until_the_memory_of_one_that_runs_is_free() -> None:
    what = trace(request("abcd", "efghijkl", 0.0), request("uvw", "x", 1.0))
    alone = 4 + 7 + worlds.STATE_BYTES
    assert replay(what, worlds.cache(2 * alone)) == [4.0, 6.0]
    # Prefill to 4, seven steps to 11, then three tokens.
    assert replay(what, worlds.cache(alone)) == [4.0, 13.0]


PRESSED = trace(
    request("abcdefgh", "ij", 0.0),
    request("abcdefghijkl", "0123456789" * 3, 20.0),  # starts from 9 tokens and runs for half a minute
    *(request(chr(200 + n) * 12, "..", 24.0 + 4 * n) for n in range(6)),  # others, short of memory beside it
)
PRESSED_BYTES = 100


def test_a_state_in_use_is_never_evicted() -> None:
    cache = Watched(worlds.cache(PRESSED_BYTES))
    replay(PRESSED, cache)
    assert cache.counters.num_evictions[Need.BYTES] > 0
    assert cache.counters.num_states_hit == 1
    assert cache.num_lost == 0


def test_without_locks_the_state_in_use_would_be_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Watched(worlds.cache(PRESSED_BYTES))
    monkeypatch.setattr(cache.tree, "lock", lambda node: None)
    monkeypatch.setattr(cache.tree, "unlock", lambda node: None)
    replay(PRESSED, cache)
    assert cache.num_lost == 1


@pytest.mark.parametrize(
    "budget", [JointBudget(1 << 40), JointBudget(400), JointBudget(40), JointBudget(3), SplitBudget(200, 40)], ids=repr
)
@pytest.mark.parametrize("gap_s", [0.0, 1.0, 30.0])
def test_every_request_begins_and_finishes_exactly_once(budget: JointBudget | SplitBudget, gap_s: float) -> None:
    needs = frozenset({Need.BYTES} if isinstance(budget, JointBudget) else {Need.KV, Need.STATE})
    what = worlds.conversations(gap_s=gap_s)
    cache = Watched(worlds.cache(budget, SeparateLru(needs)))
    ttft_s = replay(what, cache)
    assert sorted(each.arrival_s for each, _ in cache.began) == [each.arrival_s for each in what.requests]
    assert sorted(map(id, (each for each, _ in cache.began))) == sorted(map(id, what.requests))
    assert sorted(map(id, (each for each, _ in cache.finished))) == sorted(map(id, what.requests))
    assert ends(cache) == sorted(ends(cache))
    assert all(seconds > 0 for seconds in ttft_s)
    assert cache.budget == budget
    check_invariants(cache.tree)
    assert not any(node.is_locked for node in cache.tree.nodes())
    assert cache.counters.num_requests == len(what.requests)


def test_what_runs_and_what_is_cached_never_exceed_the_memory() -> None:
    class Checked(Watched):
        def resize(self, budget: JointBudget | SplitBudget, now_s: float) -> bool:
            kept = super().resize(budget, now_s)
            fits.append(kept and isinstance(budget, JointBudget) and self.num_bytes <= budget.num_bytes)
            return kept

    fits: list[bool] = []
    cache = Checked(worlds.cache(400))
    replay(worlds.conversations(gap_s=1.0), cache)
    assert cache.most_running > 1
    assert len(fits) == cache.counters.num_requests
    assert all(fits)


def test_requests_that_never_meet_hit_what_they_hit_in_series() -> None:
    what = worlds.conversations(gap_s=1e4)
    one, other = worlds.cache(), worlds.cache()
    in_series = serial.replay(what, Subject(one), SecondAToken())
    queued = queueing.replay(what, Subject(other), SPEED, Batching())
    assert sum(in_series.hit_tokens) > 0
    assert queued.hit_tokens == in_series.hit_tokens
    assert queued.ttft_s == pytest.approx(in_series.ttft_s)
    assert one.num_bytes == other.num_bytes


GROUP = trace(*(request("s" * 40 + letter * 8, "o", 0.0) for letter in "abcd"))


def test_of_prompts_that_arrive_together_the_first_leaves_a_state_where_the_others_go_on() -> None:
    """The first takes 48 s, the others 8 each from the end of what all share."""
    outcome = queueing.replay(GROUP, Subject(worlds.cache()), SPEED, Batching())
    assert outcome.hit_tokens == [0, 40, 40, 40]
    assert outcome.ttft_s == [48.0, 72.0, 72.0, 72.0]


def test_an_admission_that_does_not_look_at_the_queue_computes_all_of_them() -> None:
    cache = worlds.cache()
    cache.admission = NoBuffer()
    assert queueing.replay(GROUP, Subject(cache), SPEED, Batching()).hit_tokens == [0, 0, 0, 0]


def test_who_shares_too_little_does_not_wait_and_others_are_not_held_up() -> None:
    """Two that share 40 tokens, and between them one that shares none: it goes with the first."""
    alike = [request("s" * 40 + letter * 8, "o", 0.0) for letter in "ab"]
    outcome = queueing.replay(
        trace(alike[0], request("x" * 10, "o", 0.0), alike[1]), Subject(worlds.cache()), SPEED, Batching()
    )
    assert outcome.hit_tokens == [0, 0, 40]
    assert outcome.ttft_s == [58.0, 58.0, 66.0]
    little = trace(*(request("s" * 20 + letter * 8, "o", 0.0) for letter in "ab"))
    assert queueing.replay(little, Subject(worlds.cache()), SPEED, Batching()).hit_tokens == [0, 0]


def test_whoever_tunes_is_told_when_a_request_finishes() -> None:
    told: list[float] = []
    what = trace(request("abcd", "efg", 0.0), request("xy", "z", 4.5))
    queueing.replay(what, Subject(worlds.cache(), lambda _, now_s: told.append(now_s)), SPEED, Batching())
    assert told == [7.0, 8.0]


def test_a_block_cache_is_refused() -> None:
    server = BlockServer("lru-block", 100, 2, Costs(1, 0, float))
    with pytest.raises(ValueError, match="--mode serial"):
        queueing.replay(worlds.conversations(unit_tokens=2), Subject(server), SPEED, Batching())


@pytest.mark.parametrize("limit", ["max_running", "max_prefill_tokens"])
def test_a_limit_of_nothing_is_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=f"{limit} must be 1 or more, got 0"):
        Batching(**{limit: 0})
