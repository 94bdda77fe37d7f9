"""Each rule sends a request where its header says, and the same request always to the same worker."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marconi.model.latency import LatencyModel
from marconi.router import command
from marconi.router.routing import (
    AFFINITY_SHARE,
    AKIN_WARMTH,
    ROUTINGS,
    Candidate,
    KvOnly,
    LeastLoaded,
    LeastPrice,
    Query,
    Reason,
    RoundRobin,
    StickyHash,
    Tolerance,
    expected_ttft_s,
    rendezvous,
    routing_of,
)
from marconi_lab.fleet.command import DEFAULT_ROUTERS


class Linear(LatencyModel):
    """A millisecond a token that is not cached."""

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        assert 0 <= num_cached_tokens < num_prompt_tokens
        return (num_prompt_tokens - num_cached_tokens) / 1000

    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        raise AssertionError("not asked of a router's")


LATENCY = Linear()
QUERY = Query(1000, b"a session")
workers_given = st.lists(
    st.builds(
        lambda hit, more, ahead, running, seen, warm, turnover, akin: Candidate(
            "", hit, hit + more, ahead, running, seen, warm, turnover, served_akin=akin
        ),
        st.sampled_from([0, 30, 500, 999]),
        st.integers(0, 500),
        st.sampled_from([0.0, 0.01, 0.4, 3.0]),
        st.integers(0, 5),
        st.sampled_from([0, 400, 700]),
        st.sampled_from([0.0, 1e3, 1e6]),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
).map(lambda given: [each._replace(name=f"w{index}") for index, each in enumerate(given)])


def fleet(*workers: Candidate) -> list[Candidate]:
    return [each._replace(name=f"w{index}") for index, each in enumerate(workers)]


def test_a_stored_prefix_is_as_near_to_every_worker_behind_which_the_store_is() -> None:
    """The idle one reads it, where the one that holds it is busy; a read that takes longer than computing is none."""
    busy = Candidate("", 900, 900, work_ahead_s=0.5, num_stored_tokens=900, read_s=0.05)
    idle, other = Candidate("", num_stored_tokens=900, read_s=0.05), Candidate("")
    decision = LeastPrice(LATENCY).choose(QUERY, fleet(busy, idle, other))
    assert (decision.worker.name, decision.expected_ttft_s) == ("w1", pytest.approx(0.15))
    slow = idle._replace(read_s=0.95)
    decision = LeastPrice(LATENCY).choose(QUERY, fleet(busy, slow, other))
    assert (decision.worker.name, decision.expected_ttft_s) == ("w0", pytest.approx(0.6))
    assert LeastPrice(LATENCY).choose(QUERY, fleet(slow)).expected_ttft_s == pytest.approx(1.0)
    held = busy._replace(work_ahead_s=0.0)
    assert LeastPrice(LATENCY).choose(QUERY, fleet(held, idle)).worker.name == "w0"


@given(given_workers=workers_given, data=st.data())
def test_a_decision_is_one_of_the_workers_whatever_their_order(
    given_workers: list[Candidate], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(given_workers))
    for name in ROUTINGS:
        decision = routing_of(name, LATENCY).choose(QUERY, given_workers)
        assert decision.worker in given_workers
        assert decision == routing_of(name, LATENCY).choose(QUERY, shuffled)
        assert decision.expected_ttft_s >= decision.worker.work_ahead_s


@given(
    given_workers=workers_given,
    slack=st.sampled_from([1.0, 1.5, 4.0]),
    grace_s=st.sampled_from([0.0, 0.2]),
    known=st.sampled_from([0, 900]),
)
def test_the_least_price_is_the_rule_in_its_header(
    given_workers: list[Candidate], slack: float, grace_s: float, known: int
) -> None:
    """By brute force, over all workers."""
    tolerance = Tolerance(0.05, slack, grace_share=0.1, grace_s=grace_s)
    query = replace(QUERY, num_known_tokens=known)
    decision = LeastPrice(LATENCY, tolerance=tolerance).choose(query, given_workers)
    grace_s = min(0.1 * LATENCY.seconds(0, QUERY.num_prompt_tokens), grace_s)
    most = max(each.num_kv_tokens for each in given_workers)
    if all(each.turnover == 0 for each in given_workers) and (known or most < 50):
        slack = min(slack, Tolerance().slack_with_room)
    ttft = {each: expected_ttft_s(LATENCY, QUERY, each, each.num_hit_tokens) for each in given_workers}
    prefill = {each: ttft[each] - each.work_ahead_s for each in given_workers}
    stored = {each: expected_ttft_s(LATENCY, QUERY, Candidate(""), each.num_kv_tokens) for each in given_workers}
    queue = min(each.work_ahead_s for each in given_workers) / LATENCY.seconds(0, QUERY.num_prompt_tokens)
    price = {
        each: each.work_ahead_s + (1 + queue) * (prefill[each] + each.turnover * stored[each]) for each in given_workers
    }
    assert decision.expected_ttft_s == ttft[decision.worker]
    if most < 50:
        in_time = [each for each in given_workers if ttft[each] <= slack * min(ttft.values()) + grace_s]
        assert decision.worker in in_time
        mean = (sum(each.num_warm_tokens for each in in_time) + QUERY.num_prompt_tokens) / len(in_time)
        most_warm = max(AKIN_WARMTH * mean, QUERY.num_prompt_tokens)
        kin = [each for each in in_time if each.served_akin and each.num_warm_tokens <= most_warm]
        homes = [each for each in in_time if each.num_seen_tokens >= AFFINITY_SHARE * QUERY.num_prompt_tokens]
        if homes:
            assert decision.reason is Reason.AFFINITY
            assert decision.worker in homes
            least = min((each.work_ahead_s, each.num_running) for each in homes)
            assert (decision.worker.work_ahead_s, decision.worker.num_running) == least
        elif kin:
            assert (decision.reason, decision.worker in kin) == (Reason.AKIN, True)
        else:
            assert decision.reason is Reason.COLD
            assert decision.worker.num_warm_tokens == min(each.num_warm_tokens for each in in_time)
        return
    in_time = [each for each in given_workers if price[each] <= slack * min(price.values()) + grace_s]
    deepest = max(each.num_kv_tokens for each in in_time)
    holders = [each for each in in_time if each.num_kv_tokens == deepest]
    assert decision.worker in holders
    assert decision.worker.work_ahead_s == min(each.work_ahead_s for each in holders)
    has_most = deepest == most or decision.worker.num_hit_tokens == max(each.num_hit_tokens for each in given_workers)
    assert decision.reason is (Reason.HIT if has_most else Reason.OVERFLOW)


def test_kin_decide_where_no_worker_has_the_prefix_unless_theirs_is_busy_or_warm() -> None:
    """A longer prefix, and who served the prompt itself last, are better reasons."""

    def chosen(akin: Candidate, *others: Candidate) -> tuple[str, str]:
        decision = LeastPrice(LATENCY).choose(QUERY, fleet(akin._replace(served_akin=True), *others))
        return decision.worker.name, decision.reason.name

    warm, idle = Candidate("", num_warm_tokens=1000.0), Candidate("")
    assert chosen(warm, idle) == ("w0", "AKIN"), "though it is less cold"
    assert chosen(warm._replace(num_warm_tokens=3000.0), idle) == ("w1", "COLD"), "it would hold more than its part"
    assert chosen(warm._replace(num_warm_tokens=3000.0), warm._replace(num_warm_tokens=1500.0)) == ("w0", "AKIN")
    assert chosen(warm, Candidate("", 100, 100)) == ("w0", "AKIN"), "a tenth of a prompt is not worth a place"
    assert chosen(warm, Candidate("", 900, 900)) == ("w1", "HIT")
    assert chosen(warm, Candidate("", num_seen_tokens=600)) == ("w1", "AFFINITY")
    assert chosen(warm._replace(work_ahead_s=0.7), idle) == ("w1", "COLD")


@pytest.mark.parametrize("rule", ["state-aware", "kv-only", "least-loaded"])
def test_of_equal_workers_kin_choose_before_the_key(rule: str) -> None:
    holder = Candidate("", 900, 900)
    for index in range(3):
        workers = fleet(holder, holder, holder)
        workers[index] = workers[index]._replace(served_akin=True)
        assert routing_of(rule, LATENCY).choose(QUERY, workers).worker.name == f"w{index}"


def fleet_of_two(work_ahead_s: float, turnover: float = 0.0) -> list[Candidate]:
    """One that has nine tenths of the prompt, and one that has nothing."""
    return fleet(Candidate("", 900, 900, work_ahead_s), Candidate("", turnover=turnover))


@pytest.mark.parametrize(("known", "turnover", "latest_s"), [(900, 0.0, 1.35), (900, 0.001, 1.6), (0, 0.0, 1.6)])
def test_what_many_want_gets_a_copy_once_its_holder_is_not_in_time_and_then_has_two_holders(
    known: int, turnover: float, latest_s: float
) -> None:
    """Sooner where that displaces nothing, 1 s there beside a tenth of a second and the wait; a conversation stays."""
    rule, query = LeastPrice(LATENCY), replace(QUERY, num_known_tokens=known)
    in_time = fleet_of_two(latest_s - 0.11, turnover)
    assert {rule.choose(query, in_time).reason for _ in range(100)} == {Reason.HIT}
    assert rule.choose(query, fleet_of_two(latest_s - 0.09, turnover)).worker.name == "w1"
    copied = fleet(Candidate("", 900, 900, 1.5), Candidate("", 900, 900, 0.2))
    assert (rule.choose(query, copied).worker.name, rule.choose(query, copied).reason) == ("w1", Reason.HIT)


@pytest.mark.parametrize(
    ("known", "chosen", "shared"),
    [
        (900, Candidate(""), 900),
        (900, Candidate("", 500, 500), 900),
        (900, Candidate("", 0, 837), 0),
        (900, Candidate("", 0, 836), 900),
        (900, Candidate("", num_seen_tokens=837), 0),
        (0, Candidate(""), 0),
    ],
)
def test_a_copy_is_asked_to_leave_a_state_where_some_worker_knows_the_prompt_and_its_own_does_not(
    known: int, chosen: Candidate, shared: int
) -> None:
    query = replace(QUERY, num_known_tokens=known)
    for name, asked in (("state-aware", shared), ("kv-only", 0), ("least-loaded", 0)):
        assert routing_of(name, LATENCY).choose(query, fleet(chosen)).shared_tokens == asked


@pytest.mark.parametrize("rule", [LeastPrice, KvOnly])
def test_a_request_waits_for_its_prefix_no_longer_than_a_share_of_its_own_prefill(
    rule: type[LeastPrice | KvOnly],
) -> None:
    """A fixed wait is nothing beside a long prompt and a multiple of a short one's prefill."""

    def choose(num_tokens: int, wait_s: float, grace_share: float) -> str:
        tolerance = Tolerance(slack=1.0, grace_share=grace_share, grace_s=0.2)
        workers = fleet(Candidate("", num_tokens, num_tokens, wait_s), Candidate(""))
        return rule(LATENCY, tolerance=tolerance).choose(Query(num_tokens, b"key"), workers).worker.name

    short_s, long_s = LATENCY.seconds(0, 40), LATENCY.seconds(0, 4_000)
    assert (choose(40, 1.2 * short_s, 0.25), choose(40, 1.3 * short_s, 0.25)) == ("w0", "w1")
    assert choose(40, 1.3 * short_s, 100.0) == "w0", "by the bound in seconds alone"
    assert (choose(4_000, long_s + 0.19, 0.25), choose(4_000, long_s + 0.21, 0.25)) == ("w0", "w1")


def test_where_requests_wait_everywhere_what_is_computed_delays_those_behind_it() -> None:
    """A copy takes 0.9 s longer; while two prefills wait on each worker, three times that."""

    def choose(more_s: float, everywhere_s: float) -> str:
        workers = [each._replace(work_ahead_s=each.work_ahead_s + everywhere_s) for each in fleet_of_two(more_s)]
        return LeastPrice(LATENCY, tolerance=Tolerance(slack=1.0, grace_s=0.01)).choose(QUERY, workers).worker.name

    assert (choose(0.9, 0.0), choose(1.0, 0.0)) == ("w0", "w1")
    assert (choose(2.7, 2.0), choose(2.8, 2.0)) == ("w0", "w1")


def test_kv_that_a_worker_has_is_not_stored_again_and_displaces_nothing() -> None:
    def choose(num_kv_tokens: int) -> str:
        workers = fleet(Candidate("", 500, num_kv_tokens, 0.3, turnover=1.0), Candidate("", 600, 600, turnover=1.0))
        return LeastPrice(LATENCY, tolerance=Tolerance(slack=1.0)).choose(QUERY, workers).worker.name

    assert (choose(500), choose(950)) == ("w1", "w0")


def test_a_cold_prompt_goes_to_its_home_as_long_as_that_is_in_time() -> None:
    def choose(work_ahead_s: float, num_seen_tokens: int) -> tuple[str, Reason]:
        workers = fleet(Candidate("", 0, 0, work_ahead_s, 0, num_seen_tokens, 5e6), Candidate("", num_warm_tokens=1.0))
        decision = LeastPrice(LATENCY, tolerance=Tolerance(slack=2.0, grace_s=0.0)).choose(QUERY, workers)
        return decision.worker.name, decision.reason

    assert choose(0.0, 600) == ("w0", Reason.AFFINITY)
    assert choose(1.5, 600) == ("w1", Reason.COLD), "2.5 s here, 1.0 s there"
    assert choose(0.0, 400) == ("w1", Reason.COLD), "less than half of it was seen there"


def test_a_cold_prompt_without_a_home_goes_to_the_least_warm_in_time_and_for_kv_only_to_the_least_loaded() -> None:
    workers = fleet(
        Candidate("", work_ahead_s=0.0, num_warm_tokens=9e5),
        Candidate("", work_ahead_s=0.3, num_warm_tokens=4e5),
        Candidate("", work_ahead_s=60.0, num_warm_tokens=0.0),
    )
    assert LeastPrice(LATENCY).choose(QUERY, workers).worker.name == "w1"
    assert KvOnly(LATENCY).choose(QUERY, workers).worker.name == "w0"


def test_kv_without_its_state_is_preferred_only_in_time() -> None:
    lost_its_state, kept_it = workers = fleet(Candidate("", 0, 990), Candidate("", 800, 800))
    assert KvOnly(LATENCY).choose(QUERY, workers).worker == lost_its_state
    decision = LeastPrice(LATENCY).choose(QUERY, workers)
    assert (decision.worker, decision.reason) == (kept_it, Reason.HIT)
    assert decision.expected_ttft_s == pytest.approx(0.2)
    slight = fleet(Candidate("", 790, 990), Candidate("", 800, 800))
    assert LeastPrice(LATENCY).choose(QUERY, slight).worker.name == "w0", "where it makes a state again"


def test_a_session_stays_while_the_fleet_is_balanced() -> None:
    def choose(work_ahead_s: float, turnover: float) -> tuple[str, Reason]:
        decision = LeastPrice(LATENCY).choose(QUERY, fleet_of_two(work_ahead_s, turnover))
        return decision.worker.name, decision.reason

    assert choose(0.0, 0.0) == ("w0", Reason.HIT)
    assert choose(0.8, 0.0) == ("w0", Reason.HIT), "0.9 s here, 1.0 s there"
    assert choose(2.0, 0.0) == ("w1", Reason.OVERFLOW), "2.1 s here, 1.0 s there"
    assert choose(2.0, 1.0) == ("w0", Reason.HIT), "2.1 s here, there 2.0 s with what it displaces"


def test_cold_prefixes_spread_over_equal_workers() -> None:
    workers = fleet(*[Candidate("")] * 8)
    rule = LeastPrice(LATENCY)
    homes = Counter(rule.choose(Query(1000, b"%d" % index), workers).worker.name for index in range(800))
    assert len(homes) == 8
    assert max(homes.values()) < 2 * min(homes.values())


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    (decision,) = [LeastPrice(LATENCY).choose(QUERY, fleet(Candidate("", 1000, 1000)))]
    assert decision.expected_ttft_s == pytest.approx(0.001)


def test_a_worker_that_goes_moves_only_its_own_keys() -> None:
    workers = fleet(*[Candidate("")] * 6)
    keys = [b"%d" % index for index in range(500)]
    before = {key: rendezvous(key, workers).name for key in keys}
    after = {key: rendezvous(key, workers[1:]).name for key in keys}
    assert {key for key in keys if before[key] != after[key]} == {key for key in keys if before[key] == "w0"}
    assert "w0" in before.values()


def test_sticky_hash_passes_on_what_its_worker_has_no_room_for() -> None:
    idle = fleet(*[Candidate("")] * 4)
    rule = StickyHash(LATENCY, max_load=1.25)
    home = rule.choose(QUERY, idle).worker
    busy = [each._replace(num_running=9) if each == home else each for each in idle]
    passed_on = rule.choose(QUERY, busy)
    assert passed_on.reason is Reason.OVERFLOW
    assert passed_on.worker == rendezvous(QUERY.key, [each for each in busy if each.name != home.name])
    assert StickyHash(LATENCY, math.inf).choose(QUERY, busy).worker.name == home.name


def test_round_robin_takes_turns_also_while_workers_come_and_go() -> None:
    rule = RoundRobin(LATENCY)

    def turns(workers: Sequence[Candidate]) -> str:
        return rule.choose(QUERY, workers).worker.name

    three = fleet(*[Candidate("")] * 3)
    assert [turns(three) for _ in range(4)] == ["w0", "w1", "w2", "w0"]
    assert [turns(three[::2]) for _ in range(3)] == ["w2", "w0", "w2"]


def test_least_loaded_goes_by_work_then_by_requests() -> None:
    workers = fleet(Candidate("", 999, 999, 2.0), Candidate("", 0, 0, 1.0, 3), Candidate("", 0, 0, 1.0, 2))
    assert LeastLoaded(LATENCY).choose(QUERY, workers).worker.name == "w2"


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: routing_of("random", LATENCY), "routing must be one of round-robin, least-loaded, .* got 'random'"),
        (lambda: StickyHash(LATENCY, 0.9), "max_load must be 1 or more, times the mean, got 0.9"),
        (lambda: Tolerance(min_share=1.1), "min_share must be 0 to 1, got 1.1"),
        (lambda: Tolerance(slack=math.nan), "slack must be 1 or more, got nan"),
        (lambda: Tolerance(slack_with_room=0.5), "slack_with_room must be 1 or more, got 0.5"),
        (lambda: Tolerance(grace_s=-1), "grace_s must be 0 or more, got -1"),
        (lambda: Tolerance(grace_share=-1), "grace_share must be 0 or more, got -1"),
    ],
)
def test_parameters_that_make_no_sense_are_named(make: object, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()  # type: ignore[operator]


def test_the_command_lines_name_the_rules_that_there_are() -> None:
    assert tuple(ROUTINGS) == command.ROUTINGS
    assert tuple(ROUTINGS) == tuple(DEFAULT_ROUTERS.split(","))
