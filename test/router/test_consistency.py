"""A fleet's index equals what its workers hold, whatever the network did, one snapshot later."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marconi.router.consistency import Fleet, Limits, Missing
from marconi.router.events.base import Batch, Cleared, Event, KvRemoved, KvStored, Snapshot, StateStored
from marconi.router.index import Chain, FleetIndex, Hit, check_invariants

from .network import Network
from .test_fleet_index import assert_same
from .worlds import BLOCK_TOKENS

CHAIN = Chain(b"", (1, 2, 3))
HELD = (KvStored((1, 2), None, b"", BLOCK_TOKENS), StateStored(2, 8, b""))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_after_any_faults_one_snapshot_makes_the_index_the_workers_truth(seed: int) -> None:
    network = Network(Random(seed))  # noqa: S311 - made-up faults
    for _ in range(60):
        network.step()
    check_invariants(network.fleet.index)
    network.heal()
    check_invariants(network.fleet.index)
    assert_same(network.fleet.index, network.workers, network.prompts)
    assert not any(network.fleet.is_doubtful(worker.name) for worker in network.workers)
    network.fleet.guesses.expire(network.now_s + network.fleet.limits.guess_s + 1.0)
    assert len(network.fleet.guesses) == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1 << 32))
def test_without_snapshots_replays_alone_make_the_index_the_workers_truth(seed: int) -> None:
    rng = Random(seed)  # noqa: S311 - made-up faults
    network = Network(rng)
    network.fleet.limits = Limits(retry_s=0.001)
    for _ in range(30):
        worker = rng.choice(network.workers)
        batch = worker.batch(worker.change(rng, network.prompts))
        network.sent.setdefault(worker.name, []).append(batch)
        network.send(worker, batch)
        network.now_s += 1.0
        network.replay()
        network.deliver(rng.randint(0, 3))
    for worker in network.workers:  # a last batch shows what is missing before it
        network.under_way.append(worker.batch([]))
    while network.under_way or any(worker.sequence >= 0 for worker in network.workers if _behind(network, worker.name)):
        network.deliver(len(network.under_way))
        network.now_s += 1.0
        network.fleet.settle()
        network.replay()
    assert_same(network.fleet.index, network.workers, network.prompts)


def _behind(network: Network, worker: str) -> bool:
    return network.fleet.is_doubtful(worker)


def fleet_of(limits: Limits | None = None) -> Fleet:
    fleet = Fleet(FleetIndex(BLOCK_TOKENS), limits)
    fleet.add_worker("w")
    return fleet


def batch(sequence: int, *events: Event, epoch: int = 1) -> Batch:
    return Batch("w", epoch, sequence, events)


def snapshot(sequence: int, number: int, *events: Event, epoch: int = 1) -> Snapshot:
    return Snapshot("w", epoch, sequence, number, events)


def hit(fleet: Fleet, now_s: float = 0.0) -> int:
    return fleet.hits(CHAIN, now_s).get("w", Hit(0, 0)).num_tokens


def test_a_gap_holds_back_what_follows_until_it_is_closed() -> None:
    fleet = fleet_of()
    assert fleet.is_doubtful("w")
    fleet.receive(batch(0), 0.0)
    assert not fleet.is_doubtful("w")
    fleet.receive(batch(2, Cleared()), 1.0)
    fleet.receive(batch(4, *HELD), 1.0)
    assert (fleet.is_doubtful("w"), fleet.counters.num_gaps) == (True, 1)
    assert fleet.missing(1.0) == [Missing("w", 1, 1, 1)]
    assert fleet.missing(1.5) == []
    assert fleet.missing(2.0) == [Missing("w", 1, 1, 1)]
    fleet.receive(batch(1, *HELD), 2.0)
    assert hit(fleet) == 8
    fleet.settle()
    assert hit(fleet) == 0
    assert fleet.missing(2.1) == [Missing("w", 1, 3, 3)]
    fleet.receive(batch(3), 3.0)
    fleet.receive(batch(3), 3.0)
    fleet.settle()
    assert (hit(fleet), fleet.is_doubtful("w"), fleet.counters.num_duplicates) == (8, False, 1)


def test_a_snapshot_closes_the_gap_before_it_and_what_it_contains_is_not_applied_again() -> None:
    fleet = fleet_of()
    fleet.receive(batch(3, Cleared()), 0.0)
    fleet.receive(batch(5, KvRemoved((1,))), 0.0)
    fleet.receive(snapshot(4, 0, *HELD), 0.0)
    assert not fleet.is_doubtful("w")
    fleet.settle()
    assert fleet.index.holding("w").kv.keys() == {2}
    fleet.receive(batch(4, Cleared()), 0.0)
    assert (fleet.counters.num_duplicates, fleet.index.holding("w").kv.keys()) == (1, {2})


def test_a_snapshot_older_than_what_was_applied_is_dropped() -> None:
    fleet = fleet_of()
    for message in (snapshot(0, 1), batch(1, *HELD), snapshot(0, 2), snapshot(1, 0)):
        fleet.receive(message, 0.0)
        fleet.settle()
    assert (hit(fleet), fleet.counters.num_stale_snapshots) == (8, 2)


def test_what_arrives_while_a_snapshot_is_applied_comes_after_it() -> None:
    fleet = fleet_of()
    fleet.receive(snapshot(0, 0, KvStored(tuple(range(1, 1001)), None, b"", BLOCK_TOKENS)), 0.0)
    fleet.work(10)
    fleet.receive(batch(1, StateStored(2, 8, b"")), 0.0)
    fleet.receive(snapshot(1, 1, *HELD), 0.0)
    fleet.receive(batch(2, KvStored((3,), 2, b"", BLOCK_TOKENS), StateStored(3, 12, b"")), 0.0)
    fleet.settle()
    assert (hit(fleet), fleet.index.holding("w").kv.keys()) == (12, {1, 2, 3})
    assert fleet.counters.num_snapshots == 2


def test_a_restart_ends_the_old_life_at_once_and_its_late_batches_are_dropped() -> None:
    fleet = fleet_of()
    fleet.receive(batch(0, *HELD), 0.0)
    fleet.receive(batch(0, epoch=2), 0.0)
    assert fleet.hits(CHAIN, 0.0) == {}
    fleet.receive(batch(1, *HELD, epoch=1), 0.0)
    fleet.receive(snapshot(9, 9, *HELD, epoch=1), 0.0)
    fleet.settle()
    assert (hit(fleet), fleet.counters.num_late, fleet.counters.num_restarts) == (0, 2, 1)
    assert fleet.index.num_blocks == 0


def test_a_restart_amid_a_snapshot_leaves_nothing_of_it() -> None:
    fleet = fleet_of()
    fleet.receive(snapshot(0, 0, KvStored(tuple(range(1, 1001)), None, b"", BLOCK_TOKENS)), 0.0)
    fleet.work(300)
    fleet.receive(batch(0, *HELD, epoch=2), 0.0)
    fleet.settle()
    assert fleet.index.holding("w").kv.keys() == {1, 2}
    assert (fleet.index.num_blocks, fleet.counters.num_snapshots) == (2, 0)
    check_invariants(fleet.index)


def test_too_much_that_waits_is_dropped_and_a_snapshot_repairs() -> None:
    fleet = fleet_of(Limits(max_waiting_batches=2, max_replayed_batches=2))
    for sequence in (5, 6, 7):
        fleet.receive(batch(sequence, *HELD), 0.0)
    assert fleet.counters.num_overflows == 1
    assert fleet.missing(0.0) == []
    fleet.receive(snapshot(7, 0, *HELD), 0.0)
    fleet.settle()
    assert (hit(fleet), fleet.is_doubtful("w")) == (8, False)


def test_a_guess_counts_until_it_is_confirmed_or_expires() -> None:
    fleet = fleet_of(Limits(guess_s=10.0))
    fleet.expect("w", CHAIN, 2, 0.0)
    assert fleet.hits(CHAIN, 9.9) == {"w": Hit(12, 12)}
    assert fleet.hits(Chain(b"tenant", CHAIN.hashes), 9.9) == {}
    assert fleet.hits(Chain(b"", (1, 2, 4)), 9.9) == {}
    assert fleet.hits(CHAIN, 10.0) == {}
    fleet.expect("w", CHAIN, 1, 20.0)
    fleet.receive(batch(0, *HELD), 20.0)
    assert (hit(fleet, 20.0), len(fleet.guesses), fleet.counters.num_guesses_given_up) == (8, 0, 1)


def test_a_guess_is_denied_by_a_younger_snapshot_but_not_by_one_that_was_under_way() -> None:
    fleet = fleet_of(Limits(guess_grace_s=1.0))
    fleet.expect("w", CHAIN, 2, 4.0)
    fleet.receive(snapshot(0, 0, *HELD), 4.5)
    fleet.settle()
    assert hit(fleet, 4.5) == 12
    fleet.receive(snapshot(0, 1, *HELD), 9.5)
    fleet.settle()
    assert hit(fleet, 9.5) == 8


@pytest.mark.parametrize("event", [Cleared(), None])
def test_a_guess_is_void_when_the_worker_lost_everything(event: Event | None) -> None:
    fleet = fleet_of()
    fleet.receive(batch(0), 0.0)
    fleet.expect("w", CHAIN, 2, 0.0)
    fleet.receive(batch(1, event) if event is not None else batch(0, epoch=2), 0.0)
    assert hit(fleet) == 0


def test_there_are_only_so_many_guesses() -> None:
    fleet = fleet_of(Limits(max_guesses=2))
    for index in range(3):
        fleet.expect("w", CHAIN, index, 0.0)
    assert [index for index, _ in fleet.guesses.on(CHAIN)] == [1, 2]


def test_what_nobody_sent_or_nobody_could_is_dropped_and_counted() -> None:
    fleet = fleet_of()
    for message in (Batch("stranger", 0, 0, HELD), batch(-1, *HELD), batch(0, *HELD, epoch=-1), snapshot(-2, 0, *HELD)):
        fleet.receive(message, 0.0)
    fleet.settle()
    assert (hit(fleet), fleet.counters.num_unknown_workers, fleet.counters.num_malformed) == (0, 1, 3)
    assert fleet.heard_s("w") is None
    with pytest.raises(KeyError, match="stranger"):
        fleet.expect("stranger", CHAIN, 0, 0.0)
    with pytest.raises(ValueError, match="index=3"):
        fleet.expect("w", CHAIN, 3, 0.0)
    with pytest.raises(ValueError, match="guess_s=0"):
        Limits(guess_s=0)


def test_a_worker_that_is_removed_is_gone_at_once() -> None:
    fleet = fleet_of()
    fleet.receive(batch(0, *HELD), 7.0)
    fleet.expect("w", CHAIN, 2, 7.0)
    assert fleet.heard_s("w") == 7.0
    fleet.remove_worker("w")
    assert fleet.hits(CHAIN, 7.0) == {}
    fleet.settle()
    assert fleet.index.blocks.num_rows == 0
