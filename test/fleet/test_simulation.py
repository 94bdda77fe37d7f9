"""A fleet's simulation: times worked by hand, one worker as a plain replay, promises kept, nothing lost."""

from dataclasses import replace
from itertools import pairwise

import pytest

from marconi.events.base import LOAD_PERIOD_S, Batch, FreeMemory, ReplayEnd, Snapshot, WorkerLoad
from marconi.policy.admission.trials import Trials
from marconi.policy.request import Request, Trace
from marconi.replay import serial
from marconi.router.dispatch import Dispatcher
from marconi.router.index import FleetIndex
from marconi.router.routing import Candidate, LeastPrice
from marconi.router.sync import Fleet
from marconi.tree import Node
from marconi_lab.fleet.simulation import FleetOutcome, simulate
from marconi_lab.fleet.tree_events import hashes_after, start_of
from marconi_lab.fleet.variants import VARIANTS
from marconi_lab.fleet.worker import Job, SimulatedWorker
from replay import worlds
from replay.worlds import SPEED, conversations, request, trace

SMALL_BYTES = 120
FAR_APART_S = 10_000.0
"""Longer than any request takes, and than a guess is kept."""


class Rig:
    """A fleet, its router and what became of a trace."""

    def __init__(
        self,
        what: Trace,
        router: str,
        num_workers: int,
        num_bytes: int,
        event_delay_s: float = 0.1,
        num_gateways: int = 1,
        reports_load: bool = True,
    ) -> None:
        self.trace = what
        self.workers = [
            SimulatedWorker(f"w{number}", worlds.server(num_bytes), SPEED, reports_load=reports_load)
            for number in range(num_workers)
        ]
        variant = VARIANTS[router]
        self.gateways = [
            Dispatcher(Fleet(FleetIndex(what.unit_tokens)), variant.make(SPEED.prefill), SPEED.prefill)
            for _ in range(num_gateways)
        ]
        self.outcome: FleetOutcome = simulate(what, self.workers, self.gateways, variant, event_delay_s)


def hashes_of_path(node: Node) -> list[int]:
    path, above = b"", node
    while above.parent is not None:
        path, above = above.key + path, above.parent
    return [int(each) for each in hashes_after(start_of(0), path, 0)]


@pytest.mark.parametrize("router", sorted(VARIANTS))
def test_one_worker_hits_what_a_plain_replay_of_its_cache_hits_whatever_the_rule(router: str) -> None:
    what = conversations(gap_s=FAR_APART_S)
    plain = serial.replay(what, worlds.server(SMALL_BYTES), SPEED.prefill)
    outcome = Rig(what, router, 1, SMALL_BYTES).outcome
    assert outcome.hit_tokens == plain.hit_tokens
    assert outcome.ttft_s == pytest.approx(plain.ttft_s)
    assert 0 < sum(plain.hit_tokens) < sum(serial.replay(what, worlds.server(), SPEED.prefill).hit_tokens), (
        "the memory is short"
    )


@pytest.mark.parametrize("router", sorted(VARIANTS))
def test_a_promise_is_the_workers_real_hit_where_the_router_hears_of_everything_at_once(router: str) -> None:
    outcome = Rig(conversations(gap_s=FAR_APART_S), router, 3, SMALL_BYTES, event_delay_s=0.0).outcome
    assert outcome.promised_tokens == outcome.hit_tokens
    assert sum(outcome.hit_tokens) > 0


def test_a_router_that_hears_late_promises_what_is_gone() -> None:
    outcome = Rig(
        conversations(gap_s=FAR_APART_S), "state-aware", 1, SMALL_BYTES, event_delay_s=3 * FAR_APART_S
    ).outcome
    assert outcome.promised_tokens != outcome.hit_tokens


@pytest.mark.parametrize(
    ("router", "num_gateways"), [("sticky-hash", 1), ("kv-only", 1), ("state-aware", 1), ("state-aware", 3)]
)
def test_at_the_end_every_index_holds_exactly_what_the_trees_hold(router: str, num_gateways: int) -> None:
    rig = Rig(conversations(gap_s=3.0), router, 3, SMALL_BYTES, num_gateways=num_gateways)
    for gateway in rig.gateways:
        index = gateway.fleet.index
        index.check_invariants()
        for worker in rig.workers:
            holding, tree = index.holding(worker.name), worker.server.hybrid.tree
            nodes = list(tree.nodes())
            assert set(holding.states) == {hashes_of_path(node)[-1] for node in nodes if node.has_state}
            assert set(holding.kv) == {each for node in nodes for each in hashes_of_path(node)}
            assert len(holding.kv) == tree.num_tokens
            assert worker.server.counters.num_evictions
        assert index.stats.num_unknown_removals == index.stats.num_conflicting == 0


@pytest.mark.parametrize(("router", "num_gateways"), [*((name, 1) for name in sorted(VARIANTS)), ("state-aware", 3)])
def test_each_request_is_served_once_and_every_prompt_token_is_hit_or_computed(router: str, num_gateways: int) -> None:
    rig = Rig(conversations(gap_s=2.0), router, 4, 200, num_gateways=num_gateways)
    requests, outcome = rig.trace.requests, rig.outcome
    assert sum(worker.num_requests for worker in rig.workers) == len(requests)
    num_computed = sum(worker.num_computed_tokens for worker in rig.workers)
    assert num_computed + sum(outcome.hit_tokens) == sum(each.num_prompt_tokens for each in requests)
    for number, worker in enumerate(rig.workers):
        assert worker.num_requests == outcome.worker_of.count(number)
    assert sum(outcome.reasons.values()) == len(requests)
    for each, hit, ttft_s in zip(requests, outcome.hit_tokens, outcome.ttft_s, strict=True):
        assert ttft_s >= SPEED.prefill.seconds(hit, each.num_prompt_tokens) - 1e-9
    for gateway in rig.gateways:
        gateway.check_invariants()
        assert not any(gateway.num_running(worker.name) for worker in rig.workers)


def test_a_request_waits_for_the_prefill_before_it_on_its_own_worker_only() -> None:
    what = trace(request("abcd", "e", 0.0), request("vwxy", "z", 1.0), request("mnop", "q", 2.0))
    assert Rig(what, "round-robin", 1, 1000).outcome.ttft_s == [4.0, 7.0, 10.0]
    assert Rig(what, "round-robin", 2, 1000).outcome.ttft_s == [4.0, 4.0, 6.0]


def test_states_are_there_after_the_prefill_and_at_the_end_of_their_request_and_not_before() -> None:
    def hit_at(arrival_s: float) -> int:
        # Prefill 0 .. 4, two steps of decoding 4 .. 6.
        what = trace(request("abcd", "efg", 0.0), request("abcdefxy", "z", arrival_s))
        return Rig(what, "round-robin", 1, 1000).outcome.hit_tokens[1]

    assert hit_at(4.1) == 3, "the state before its prompt's last token"
    assert hit_at(5.9) == 3
    assert hit_at(6.1) == 6


# Load


class Hearing(Fleet):
    """A fleet that keeps the loads that it hears, and when."""

    def __init__(self) -> None:
        super().__init__(FleetIndex(1))
        self.heard: list[tuple[float, WorkerLoad]] = []

    def receive(self, message: Batch | Snapshot | ReplayEnd, now_s: float) -> None:
        if isinstance(message, Batch) and message.load is not None:
            self.heard.append((now_s, message.load))
        super().receive(message, now_s)


def test_a_worker_tells_what_runs_what_waits_and_what_is_free_as_its_step_began() -> None:
    worker = SimulatedWorker("w", worlds.server(1000), SPEED)
    gateway = Dispatcher(Fleet(FleetIndex(1)), VARIANTS["round-robin"].make(SPEED.prefill), SPEED.prefill)
    gateway.add_worker("w")
    jobs = []
    for each in (request("abcd", "ef"), request("xyz", "w")):
        ticket = gateway.dispatch(VARIANTS["round-robin"].prompt(each, 1), 0.0)
        jobs.append(Job(0, each, gateway, ticket))
        worker.add(jobs[-1])
    worker.begin(0.0)
    told = worker.load_batch(2.5)
    assert told is not None
    # Nothing was cached yet, so of what waits everything is to be computed. A row takes three slots of 100.
    assert told.load == WorkerLoad(1, 1, 33, 4 + 3, FreeMemory(996, 0, 100, 0), age_s=2.5)
    worker.prefilled(jobs[0], 4.0)
    worker.finished(jobs[0], 5.0)
    told = worker.load_batch(5.0)
    assert told is not None
    held = worker.server.held
    num_free = 1000 - held.num_tokens - 10 * held.num_states
    memory = FreeMemory(num_free, held.num_tokens, num_free // 10, held.num_states)
    assert told.load == WorkerLoad(0, 1, 33, 3, memory)
    assert SimulatedWorker("w", worlds.server(), SPEED, reports_load=False).load_batch(0.0) is None


def test_a_busy_worker_is_heard_as_often_as_a_servers_and_the_last_word_is_that_it_is_idle() -> None:
    fleet = Hearing()
    variant = VARIANTS["least-loaded"]
    worker = SimulatedWorker("w", worlds.server(), SPEED)
    # Busy from 0 to 7.
    what = trace(request("abcd", "efgh", 0.0))
    simulate(what, [worker], [Dispatcher(fleet, variant.make(SPEED.prefill), SPEED.prefill)], variant, 0.125)
    times = [at_s for at_s, _ in fleet.heard]
    assert times[0] == 0.125
    assert times[-1] == 7.125
    assert all(after - before <= LOAD_PERIOD_S for before, after in pairwise(times))
    assert [(load.num_running, load.age_s) for _, load in fleet.heard[:3]] == [(1, 0.0), (1, 0.5), (1, 1.0)]
    assert fleet.heard[-1][1].num_running == 0


@pytest.mark.parametrize(
    ("reports_load", "num_gateways", "is_seen"), [(True, 2, True), (False, 2, False), (False, 1, True)]
)
def test_what_another_gateway_sent_is_seen_by_the_workers_loads_alone(
    reports_load: bool, num_gateways: int, is_seen: bool
) -> None:
    """Equal prompts belong to the same worker, unless it is known to be busy."""
    what = trace(request("abcdefgh", "i", 0.0), request("abcdefgh", "i", 1.0))
    rig = Rig(what, "least-loaded", 2, 1000, num_gateways=num_gateways, reports_load=reports_load)
    first, second = rig.outcome.worker_of
    assert (first != second) is is_seen


@pytest.mark.parametrize(("router", "num_hit_tokens"), [("state-aware", 192), ("kv-only-placed", 0)])
def test_a_copy_of_what_another_worker_knows_is_resumed_from_at_once(
    router: str, num_hit_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt's worker is busy with it; to the other, the second prompt's beginning is new."""
    monkeypatch.setattr(Trials, "num_allowed", 0)
    ends = ("a" * 800, "b" * 100, "c" * 100)
    what = trace(*(request("x" * 192 + end, "i", 300.0 * number) for number, end in enumerate(ends)))
    outcome = Rig(what, router, 2, 100_000).outcome
    first, second, third = outcome.worker_of
    assert first != second == third
    assert outcome.hit_tokens == [0, 0, num_hit_tokens]


def test_sessions_that_begin_alike_are_told_apart_by_their_session_alone() -> None:
    same = replace(conversations(num_sessions=20, num_turns=1), unit_tokens=1)
    by_session = {VARIANTS["sticky-session"].prompt(each, 1).key for each in same.requests}
    assert len(by_session) == 20
    beginning = VARIANTS["sticky-hash"]
    first, second = same.requests[:2]
    longer = replace(first, path=first.path[:4] * 2000, num_prompt_tokens=2000, num_known_tokens=2000)
    changed = replace(longer, path=longer.path[: 4 * 1500] + second.path[-4:] * 500)
    assert beginning.prompt(longer, 1).key == beginning.prompt(changed, 1).key
    assert beginning.prompt(longer, 1).chain.hashes[-1] != beginning.prompt(changed, 1).chain.hashes[-1]


def test_kv_only_placed_counts_kv_and_does_all_else_as_state_aware() -> None:
    counting, aware = (VARIANTS[name].make(SPEED.prefill) for name in ("kv-only-placed", "state-aware"))
    assert isinstance(counting, LeastPrice)
    assert isinstance(aware, LeastPrice)
    assert (counting.tolerance, counting.latency) == (aware.tolerance, aware.latency)
    worker = Candidate("w", num_hit_tokens=800, num_kv_tokens=990)
    assert (counting.num_cached_tokens(worker), aware.num_cached_tokens(worker)) == (990, 800)


def test_a_prompt_offers_no_position_at_its_last_token() -> None:
    prompt = VARIANTS["state-aware"].prompt(Request(bytes(16), 4, 1, 4, 0.0), 1)
    assert len(prompt.chain.hashes) == 3
    blocks = VARIANTS["state-aware"].prompt(Request(bytes(16), 4 * 64, 1, 4 * 64, 0.0), 64)
    assert len(blocks.chain.hashes) == 3


def test_a_hash_stands_for_all_before_it_and_goes_on_from_any_position() -> None:
    paths = [bytes([a, 0, 0, 0, b, 0, 0, 0, c, 0, 0, 0]) for a in range(6) for b in range(6) for c in range(6)]
    found = {}
    for namespace in (0, 1):
        for path in paths:
            hashes = hashes_after(start_of(namespace), path, 0).tolist()
            for end, each in enumerate(hashes, start=1):
                assert found.setdefault(each, (namespace, path[: 4 * end])) == (namespace, path[: 4 * end])
            for split in (1, 2):
                rest = hashes_after(hashes[split - 1], path[4 * split :], split).tolist()
                assert hashes[split:] == rest
    assert len(found) == 2 * (6 + 36 + 216)
