"""A worker's report of its load counts what other clients have there, and this router's requests once."""

from dataclasses import replace
from random import Random

import pytest

from marconi.events.base import Batch, FreeMemory, KvRemoved, KvStored, StateStored, WorkerLoad
from marconi.events.hashes import HashSpace
from marconi.model.latency import LatencyModel
from marconi.router.dispatch import Dispatcher, Prompt, Ticket, prompt_of
from marconi.router.index import Chain, FleetIndex
from marconi.router.load_report import LoadReport, Others
from marconi.router.routing import routing_of
from marconi.router.sync import Fleet

BLOCK = 4
SPACE = HashSpace.of("m", None, None)
FRESH_S = 1_000.0
ROOMY = FreeMemory(10_000, 0, 100, 0)


class Linear(LatencyModel):
    """A second for each token that is not cached."""

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        return float(num_prompt_tokens - num_cached_tokens)

    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        raise AssertionError("not asked of a router's")


def dispatcher(*names: str) -> Dispatcher:
    made = Dispatcher(Fleet(FleetIndex(BLOCK)), routing_of("state-aware", Linear()), Linear())
    for name in names:
        made.add_worker(name)
    return made


def ten_tokens(router: Dispatcher, now_s: float, worker: str = "a") -> Ticket:
    return router.dispatch(Prompt(Chain(b"", ()), 10, b"k"), now_s, among=(worker,))


def report(router: Dispatcher, worker: str, load: WorkerLoad, now_s: float, received_s: float | None = None) -> None:
    router.fleet.sync(worker).load_report = LoadReport(
        load, now_s, now_s if received_s is None else received_s, FRESH_S
    )


def busy(num_prefill_tokens: int, num_waiting: int = 0, num_running: int = 1) -> WorkerLoad:
    return WorkerLoad(num_running, num_waiting, 100, num_prefill_tokens)


# Other clients


@pytest.mark.parametrize("is_reported", [True, False], ids=["reported", "control"])
def test_a_worker_that_another_client_keeps_busy_is_passed_by(is_reported: bool) -> None:
    """The prefix is on `a`, whose queue is a second client's. Without its word this router cannot know."""
    router = dispatcher("a", "b")
    ids = range(41)
    known = prompt_of(ids, SPACE, BLOCK)
    events = (
        KvStored(tuple(known.chain.hashes), None, SPACE.namespace, BLOCK),
        StateStored(known.chain.hashes[-1], 40, SPACE.namespace),
    )
    load = busy(5_000, num_waiting=50) if is_reported else None
    router.fleet.receive(Batch("a", 1, 0, events, load), 0.0)
    assert router.dispatch(known, 0.0).worker == ("b" if is_reported else "a")


def test_of_two_workers_the_one_with_fewer_requests_of_others_is_less_loaded() -> None:
    for name, other in (("a", "b"), ("b", "a")):
        router = dispatcher("a", "b")
        report(router, name, busy(0, num_running=30), 0.0)
        report(router, other, busy(0, num_running=2), 0.0)
        assert router.dispatch(Prompt(Chain(b"", ()), 10, b"k"), 0.0).worker == other


def test_prefills_of_others_are_work_ahead_and_are_done_as_time_passes() -> None:
    router = dispatcher("a")
    report(router, "a", busy(40, num_waiting=2), 0.0)
    assert router.work_ahead_s("a", 0.0) == 40.0
    assert router.work_ahead_s("a", 15.0) == 25.0
    first = ten_tokens(router, 15.0)
    assert not first.is_next, "it says nothing of how long a prefill takes"
    assert router.work_ahead_s("a", 15.0) == 35.0
    assert router.work_ahead_s("a", 400.0) == 0.0


# This router's own requests


def test_a_request_that_the_worker_reports_is_not_counted_twice() -> None:
    router = dispatcher("a")
    tickets = [ten_tokens(router, 0.0) for _ in range(3)]
    report(router, "a", busy(30, num_waiting=2), 1.0)
    assert router.work_ahead_s("a", 0.0) == 30.0
    router.answered(tickets[0], 10.0)
    report(router, "a", busy(20, num_waiting=1, num_running=2), 10.0)
    assert router.work_ahead_s("a", 10.0) == 20.0


def test_control_the_same_report_of_a_worker_that_was_given_nothing_is_others_work() -> None:
    router = dispatcher("a")
    report(router, "a", busy(30, num_waiting=2), 1.0)
    assert router.work_ahead_s("a", 1.0) == 30.0


def test_a_request_that_was_sent_after_the_reported_moment_is_not_lost() -> None:
    """The worker's word is from before the third request, and comes after it."""
    router = dispatcher("a")
    for now_s in (0.0, 1.0, 5.0):
        ten_tokens(router, now_s)
    report(router, "a", busy(27, num_waiting=2), 3.0, received_s=6.0)
    others_s = 7.0  # 20 of the tokens reported are this router's, so is the third request, which is not among them
    assert router.work_ahead_s("a", 3.0) == 30.0 - 3.0 + others_s


def test_a_request_that_ended_after_the_reported_moment_is_not_another_clients() -> None:
    router = dispatcher("a")
    ticket = ten_tokens(router, 0.0)
    router.answered(ticket, 12.0)
    router.ended(ticket, 13.0)
    report(router, "a", busy(10), 11.0, received_s=14.0)
    assert router.work_ahead_s("a", 14.0) == 0.0
    assert router.dispatch(Prompt(Chain(b"", ()), 10, b"k"), 14.0).decision.worker.num_running == 0


@pytest.mark.parametrize("seed", range(20))
def test_others_are_what_is_reported_less_what_this_router_had_there_at_that_moment(seed: int) -> None:
    """Random histories, reported at a random past moment, beside a count by brute force."""
    rng = Random(seed)  # noqa: S311 - a schedule
    others = Others()
    now_s = 0.0
    begun: list[tuple[float, int]] = []
    answered_s: dict[int, float] = {}
    ended_s: dict[int, float] = {}
    for _ in range(60):
        now_s += rng.choice((0.25, 0.5, 1.0))
        open_ = [index for index in range(len(begun)) if index not in ended_s]
        action = rng.random()
        if action < 0.5 or not open_:
            begun.append((now_s, rng.randrange(1, 50)))
            others.note(now_s, 1, begun[-1][1])
            continue
        index = rng.choice(open_)
        is_answered = index in answered_s
        if action < 0.75 and not is_answered:
            answered_s[index] = now_s
            others.note(now_s, 0, -begun[index][1])
        else:
            ended_s[index] = now_s
            others.note(now_s, -1, 0 if is_answered else -begun[index][1])
        made_s = now_s - rng.choice((0.0, 0.3, 2.1, 7.0))
        ours = [index for index, (at_s, _) in enumerate(begun) if at_s <= made_s < ended_s.get(index, now_s + 1)]
        tokens = sum(begun[index][1] for index in ours if made_s < answered_s.get(index, now_s + 1))
        num_others, other_tokens = rng.randrange(5), rng.randrange(100)
        load = WorkerLoad(len(ours) + num_others, 0, 100, tokens + other_tokens)
        others.update(LoadReport(load, made_s, made_s, FRESH_S), Linear().seconds)
        assert others.num_requests(made_s) == num_others
        assert others.prefill_s(made_s, 0.0) == other_tokens


# Age


def test_a_report_that_gets_old_counts_for_less_and_then_for_nothing() -> None:
    router = dispatcher("a")
    load = busy(0, num_running=40)
    router.fleet.sync("a").load_report = LoadReport(load, 0.0, 0.0, 2.0)
    running = [
        router.dispatch(Prompt(Chain(b"", ()), 1, b"k"), now_s).decision.worker.num_running
        for now_s in (0.0, 2.0, 3.0, 4.0, 9.0)
    ]
    assert running == [40, 40 + 1, 20 + 2, 3, 4], "this router's own stay"


def test_an_older_report_does_not_replace_a_newer_one_and_a_restart_forgets_both() -> None:
    fleet = Fleet(FleetIndex(BLOCK))
    fleet.add_worker("a")
    for sequence, num_running in ((4, 5), (2, 1), (3, 2)):
        fleet.receive(Batch("a", 1, sequence, (), busy(0, num_running=num_running)), 10.0)
    found = fleet.sync("a").load_report
    assert found is not None
    assert (found.load.num_running, found.sequence) == (5, 4)
    fleet.receive(Batch("a", 1, 5, (), replace(busy(0), age_s=1.5)), 20.0)
    found = fleet.sync("a").load_report
    assert found is not None
    assert (found.made_s, found.received_s) == (18.5, 20.0)
    fleet.receive(Batch("a", 2, 0, ()), 21.0)
    assert fleet.sync("a").load_report is None


# Room


def one_that_took_50_s(router: Dispatcher) -> None:
    """`a` is known to hold a request for 50 s."""
    ticket = ten_tokens(router, 0.0)
    router.answered(ticket, 10.0)
    router.ended(ticket, 60.0)


def test_requests_wait_for_others_to_end_where_the_worker_runs_as_many_as_it_can() -> None:
    router = dispatcher("a")
    one_that_took_50_s(router)
    assert router.work_ahead_s("a", 60.0) == 0.0
    report(router, "a", WorkerLoad(4, 3, 4, 0), 60.0)
    held_s = router.load("a", 60.0).held.mean_s(60.0)
    assert router.work_ahead_s("a", 60.0) == (4 + 3 + 1 - 4) * held_s / 4
    report(router, "a", WorkerLoad(3, 0, 4, 0), 61.0)
    assert router.work_ahead_s("a", 61.0) == 0.0


def test_a_request_waits_for_one_to_end_where_its_memory_cannot_be_evicted() -> None:
    router = dispatcher("a")
    one_that_took_50_s(router)
    for memory, waits in (
        (FreeMemory(4, 6, 1, 0), False),
        (FreeMemory(4, 5, 1, 0), True),
        (FreeMemory(4, 6, 0, 0), True),
        (FreeMemory(4, 6, 0, 1), False),
    ):
        report(router, "a", WorkerLoad(2, 0, 100, 0, memory), 60.0)
        ticket = ten_tokens(router, 60.0)
        held_s = router.load("a", 60.0).held.mean_s(60.0)
        assert ticket.decision.worker.work_ahead_s == (held_s / 2 if waits else 0.0), memory
        router.refused(ticket, 60.0)


@pytest.mark.parametrize("memory", [ROOMY, FreeMemory(0, 1_000, 0, 100)], ids=["room", "full"])
def test_turnover_is_what_a_worker_removed_whatever_memory_it_reports(memory: FreeMemory) -> None:
    """A full cache may evict states alone, and no prefix with them."""
    router = dispatcher("a")
    stored = tuple(KvStored((number,), None, b"", BLOCK) for number in range(64))
    router.fleet.receive(Batch("a", 1, 0, stored, WorkerLoad(0, 0, 100, 0, memory)), 0.0)
    assert ten_tokens(router, 0.0).decision.worker.turnover == 0.0
    router.fleet.receive(Batch("a", 1, 1, tuple(KvRemoved(each.block_hashes) for each in stored[:32])), 0.0)
    assert ten_tokens(router, 0.0).decision.worker.turnover == 0.5


# Limits


def test_a_limit_that_was_reported_outlives_the_report_and_stands_for_workers_that_never_reported_one() -> None:
    """Else a router fills each worker that it comes to far beyond its limit, until that has reported its load."""
    router = dispatcher("a", "b")
    for number in range(3):
        router.answered(ten_tokens(router, 10.0 * number, "b"), 10.0 * number + 10.0)
    assert router.work_ahead_s("b", 30.0) == 0.0, "nothing is known"
    report(router, "a", WorkerLoad(1, 0, 3, 0), 30.0)
    router.load("a", 30.0)
    assert router.work_ahead_s("b", 30.0) > 0.0, "as many run as another worker takes"
    late_s = 30.0 + 2 * FRESH_S
    assert router.load("a", late_s).others.load(late_s) is None
    for name in ("a", "b"):
        while router.num_running(name) < 3:
            router.answered(ten_tokens(router, late_s, name), late_s + 10.0)
    assert router.work_ahead_s("a", late_s + 10.0) > 0.0
    report(router, "b", WorkerLoad(3, 0, 100, 0), late_s + 10.0)
    assert router.work_ahead_s("b", late_s + 10.0) == 0.0, "its own counts first"
