"""A fleet's index equals what its workers hold, whatever the network did, one snapshot later."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marconi.events.base import Batch, Cleared, Event, KvRemoved, KvStored, ReplayEnd, Snapshot, StateStored
from marconi.router.index import Chain, FleetIndex, Hit
from marconi.router.sync import Fleet, SnapshotRequest, State, SyncLimits

from .network import Network
from .test_fleet_index import assert_same
from .worlds import BLOCK_TOKENS

CHAIN = Chain(b"", (1, 2, 3))
HELD = (KvStored((1, 2), None, b"", BLOCK_TOKENS), StateStored(2, 8, b""))


@settings(max_examples=60)
@given(st.integers(0, 1 << 32))
def test_after_any_faults_one_snapshot_makes_the_index_the_workers_truth(seed: int) -> None:
    network = Network(Random(seed))  # noqa: S311 - made-up faults
    for _ in range(60):
        network.step()
    network.fleet.index.check_invariants()
    network.heal()
    network.fleet.index.check_invariants()
    assert_same(network.fleet.index, network.workers, network.prompts)
    assert {network.fleet.sync(worker.name).state for worker in network.workers} == {State.CURRENT}
    network.fleet.guesses.expire(network.now_s + network.fleet.limits.guess_s + 1.0)
    assert len(network.fleet.guesses) == 0


@settings(max_examples=30)
@given(st.integers(0, 1 << 32), st.booleans())
def test_what_is_requested_makes_the_index_the_workers_truth_also_where_no_snapshot_ever_comes(
    seed: int, snapshots: bool
) -> None:
    rng = Random(seed)  # noqa: S311 - made-up faults
    network = Network(rng)
    network.fleet.limits = limits = SyncLimits(retry_s=0.001, snapshot_period_s=1e6)
    network.start_router(limits)
    for _ in range(30):
        worker = rng.choice(network.workers)
        batch = worker.batch(worker.change(rng, network.prompts))
        network.sent.setdefault(worker.name, []).append(batch)
        network.send(worker, batch)
        network.now_s += 1.0
        network.answer_requests(snapshots=snapshots)
        network.deliver(rng.randint(0, 3))
    for worker in network.workers:  # a last batch shows what is missing before it
        network.sent.setdefault(worker.name, []).append(worker.batch([]))
        network.under_way.append(network.sent[worker.name][-1])
    while network.under_way or any(
        network.fleet.sync(worker.name).state in (State.UNKNOWN, State.GAP) for worker in network.workers
    ):
        network.deliver(len(network.under_way))
        network.now_s += 1.0
        network.fleet.settle()
        network.answer_requests(snapshots=snapshots)
    network.fleet.settle()
    network.fleet.index.check_invariants()
    assert_same(network.fleet.index, network.workers, network.prompts)


def fleet_of(limits: SyncLimits | None = None) -> Fleet:
    fleet = Fleet(FleetIndex(BLOCK_TOKENS), limits)
    fleet.add_worker("w")
    return fleet


def batch(sequence: int, *events: Event, epoch: int = 1) -> Batch:
    return Batch("w", epoch, sequence, events)


def snapshot(sequence: int, number: int, *events: Event, epoch: int = 1) -> Snapshot:
    return Snapshot("w", epoch, sequence, number, events)


def fates(made: int, confirmed: int = 0, expired: int = 0, denied: int = 0, taken_back: int = 0) -> dict[str, int]:
    return {"made": made, "confirmed": confirmed, "expired": expired, "denied": denied, "taken_back": taken_back}


def hit(fleet: Fleet, now_s: float = 0.0) -> int:
    return fleet.hits(CHAIN, now_s).get("w", Hit(0, 0)).num_tokens


def test_a_gap_holds_back_what_follows_until_it_is_closed() -> None:
    fleet = fleet_of()
    assert fleet.sync("w").state is State.UNKNOWN
    fleet.receive(batch(0), 0.0)
    assert fleet.sync("w").state is State.CURRENT
    fleet.receive(batch(2, Cleared()), 1.0)
    fleet.receive(batch(4, *HELD), 1.0)
    assert (fleet.sync("w").state, fleet.stats.num_gaps) == (State.GAP, 1)
    assert fleet.requests(1.0) == [SnapshotRequest("w", 1)]
    fleet.receive(batch(1, *HELD), 1.0)
    assert hit(fleet) == 8
    fleet.settle()
    assert hit(fleet) == 0
    assert fleet.requests(1.1) == [SnapshotRequest("w", 3)]
    fleet.receive(batch(3), 3.0)
    fleet.receive(batch(3), 3.0)
    fleet.settle()
    assert (hit(fleet), fleet.sync("w").state, fleet.stats.num_duplicates) == (8, State.CURRENT, 1)


def test_a_request_that_changed_nothing_is_made_again_for_the_other_of_the_two() -> None:
    fleet = fleet_of(SyncLimits(retry_s=1.0))
    replay, whole = SnapshotRequest("w", 1), SnapshotRequest("w", None)
    fleet.receive(batch(0), 0.0)
    fleet.receive(batch(2), 0.0)
    found = {now_s: fleet.requests(now_s) for now_s in (0.0, 0.9, 1.0, 1.9, 2.0, 3.0)}
    assert found == {0.0: [replay], 0.9: [], 1.0: [whole], 1.9: [], 2.0: [replay], 3.0: [whole]}


def test_a_replay_that_ends_without_the_batch_requests_a_snapshot_at_once() -> None:
    fleet = fleet_of()
    fleet.receive(batch(0), 0.0)
    fleet.receive(batch(2), 0.0)
    assert fleet.requests(0.0) == [SnapshotRequest("w", 1)]
    fleet.receive(ReplayEnd("w"), 0.1)
    assert fleet.requests(0.1) == [SnapshotRequest("w", None)]
    fleet.receive(ReplayEnd("w"), 0.2)
    assert fleet.requests(0.2) == [], "it is not the answer to the snapshot"


def test_a_snapshot_is_requested_of_an_unknown_worker_at_once_and_of_a_current_one_every_period() -> None:
    fleet = fleet_of(SyncLimits(retry_s=1.0, snapshot_period_s=5.0))
    whole = [SnapshotRequest("w", None)]
    assert [fleet.requests(now_s) for now_s in (0.0, 0.5, 1.0)] == [whole, [], whole]
    fleet.receive(snapshot(7, 0, *HELD), 1.5)
    assert fleet.sync("w").state is State.LOADING
    assert fleet.requests(99.0) == []
    fleet.settle()
    assert fleet.sync("w").state is State.CURRENT
    assert [fleet.requests(now_s) for now_s in (5.9, 6.0, 10.9, 11.0)] == [[], whole, [], whole]
    fleet.receive(batch(0, epoch=2), 12.0)
    assert [fleet.requests(now_s) for now_s in (12.0, 16.9, 17.0)] == [[], [], whole], "nothing is missing"
    fleet.receive(batch(3, epoch=3), 20.0)
    assert (fleet.sync("w").state, fleet.requests(20.0)) == (State.UNKNOWN, whole)


def test_a_snapshot_closes_the_gap_before_it_and_what_it_contains_is_not_applied_again() -> None:
    fleet = fleet_of()
    fleet.receive(batch(3, Cleared()), 0.0)
    fleet.receive(batch(5, KvRemoved((1,))), 0.0)
    fleet.receive(snapshot(4, 0, *HELD), 0.0)
    assert fleet.sync("w").state is State.LOADING
    fleet.settle()
    assert fleet.sync("w").state is State.CURRENT
    assert fleet.index.holding("w").kv.keys() == {2}
    fleet.receive(batch(4, Cleared()), 0.0)
    assert (fleet.stats.num_duplicates, fleet.index.holding("w").kv.keys()) == (1, {2})


def test_a_snapshot_older_than_what_was_applied_is_dropped() -> None:
    fleet = fleet_of()
    for message in (snapshot(0, 1), batch(1, *HELD), snapshot(0, 2), snapshot(1, 0)):
        fleet.receive(message, 0.0)
        fleet.settle()
    assert (hit(fleet), fleet.stats.num_stale_snapshots) == (8, 2)


def test_what_arrives_while_a_snapshot_is_applied_comes_after_it() -> None:
    fleet = fleet_of()
    fleet.receive(snapshot(0, 0, KvStored(tuple(range(1, 1001)), None, b"", BLOCK_TOKENS)), 0.0)
    fleet.work(10)
    fleet.receive(batch(1, StateStored(2, 8, b"")), 0.0)
    fleet.receive(snapshot(1, 1, *HELD), 0.0)
    fleet.receive(batch(2, KvStored((3,), 2, b"", BLOCK_TOKENS), StateStored(3, 12, b"")), 0.0)
    fleet.settle()
    assert (hit(fleet), fleet.index.holding("w").kv.keys()) == (12, {1, 2, 3})
    assert fleet.stats.num_snapshots == 2


def test_a_restart_ends_the_old_life_at_once_and_its_late_batches_are_dropped() -> None:
    fleet = fleet_of()
    fleet.receive(batch(0, *HELD), 0.0)
    fleet.receive(batch(0, epoch=2), 0.0)
    assert fleet.hits(CHAIN, 0.0) == {}
    fleet.receive(batch(1, *HELD, epoch=1), 0.0)
    fleet.receive(snapshot(9, 9, *HELD, epoch=1), 0.0)
    fleet.settle()
    assert (hit(fleet), fleet.stats.num_late, fleet.stats.num_restarts) == (0, 2, 1)
    assert fleet.index.num_blocks == 0


def test_a_restart_amid_a_snapshot_leaves_nothing_of_it() -> None:
    fleet = fleet_of()
    fleet.receive(snapshot(0, 0, KvStored(tuple(range(1, 1001)), None, b"", BLOCK_TOKENS)), 0.0)
    fleet.work(300)
    fleet.receive(batch(0, *HELD, epoch=2), 0.0)
    fleet.settle()
    assert fleet.index.holding("w").kv.keys() == {1, 2}
    assert (fleet.index.num_blocks, fleet.stats.num_snapshots) == (2, 0)
    fleet.index.check_invariants()


def test_too_much_that_waits_is_dropped_and_a_snapshot_repairs() -> None:
    fleet = fleet_of(SyncLimits(max_waiting_batches=2, max_replayed_batches=2))
    for sequence in (5, 6, 7):
        fleet.receive(batch(sequence, *HELD), 0.0)
    assert fleet.stats.num_overflows == 1
    assert [fleet.requests(now_s) for now_s in (0.0, 1.0)] == [[SnapshotRequest("w", None)]] * 2, (
        "too much for a replay"
    )
    fleet.receive(snapshot(7, 0, *HELD), 1.0)
    fleet.settle()
    assert (hit(fleet), fleet.sync("w").state) == (8, State.CURRENT)


def test_a_guess_counts_until_it_is_confirmed_or_expires() -> None:
    fleet = fleet_of(SyncLimits(guess_s=10.0))
    fleet.expect("w", CHAIN, 2, 0.0)
    assert fleet.hits(CHAIN, 9.9) == {"w": Hit(12, 12)}
    assert fleet.hits(Chain(b"tenant", CHAIN.hashes), 9.9) == {}
    assert fleet.hits(Chain(b"", (1, 2, 4)), 9.9) == {}
    assert fleet.hits(CHAIN, 10.0) == {}
    fleet.expect("w", CHAIN, 1, 20.0)
    fleet.receive(batch(0, *HELD), 20.0)
    assert (hit(fleet, 20.0), len(fleet.guesses), fleet.guesses.fates["expired"]) == (8, 0, 1)


def test_a_guess_is_confirmed_by_a_state_in_the_block_after_it_as_workers_keep_it_before_a_prompts_last_token() -> None:
    fleet = fleet_of()
    fleet.receive(batch(0, KvStored((1,), None, b"", BLOCK_TOKENS), StateStored(1, 4, b"")), 0.0)
    fleet.expect("w", CHAIN, 1, 0.0)
    part = (KvStored((77,), 2, b"", 3), StateStored(77, 11, b""))
    fleet.receive(batch(1, KvStored((2,), 1, b"", BLOCK_TOKENS), *part), 0.0)
    assert (len(fleet.guesses), fleet.guesses.fates) == (0, fates(made=1, confirmed=1))
    assert hit(fleet) == 4, "from then on the index knows: of this prompt only the first block can be started from"


def test_control_what_a_worker_stores_elsewhere_confirms_no_guess() -> None:
    fleet = fleet_of()
    fleet.expect("w", CHAIN, 1, 0.0)
    fleet.receive(batch(0, KvStored((1,), None, b"", BLOCK_TOKENS), StateStored(1, 4, b"")), 0.0)
    fleet.receive(batch(1, KvStored((1, 2), None, b"tenant", BLOCK_TOKENS)), 0.0)
    assert (len(fleet.guesses), hit(fleet)) == (1, 8)


def test_a_snapshot_confirms_guesses_of_which_it_holds_the_block() -> None:
    fleet = fleet_of()
    fleet.expect("w", CHAIN, 1, 0.0)
    part = (KvStored((77,), 2, b"", 3), StateStored(77, 11, b""))
    fleet.receive(snapshot(0, 0, KvStored((1, 2), None, b"", BLOCK_TOKENS), *part), 0.5)
    fleet.settle()
    assert (len(fleet.guesses), fleet.guesses.fates["confirmed"]) == (1, 0), "it was made while that was on its way"
    fleet.receive(snapshot(0, 1, KvStored((1, 2), None, b"", BLOCK_TOKENS), *part), 5.5)
    fleet.settle()
    assert (len(fleet.guesses), fleet.guesses.fates["confirmed"]) == (0, 1)


def test_a_guess_is_denied_by_a_younger_snapshot_but_not_by_one_that_was_under_way() -> None:
    fleet = fleet_of(SyncLimits(guess_grace_s=1.0))
    fleet.expect("w", CHAIN, 2, 4.0)
    fleet.receive(snapshot(0, 0, *HELD), 4.5)
    fleet.settle()
    assert hit(fleet, 4.5) == 12
    fleet.receive(snapshot(0, 1, *HELD), 9.5)
    fleet.settle()
    assert (hit(fleet, 9.5), fleet.guesses.fates) == (8, fates(made=1, denied=1))


@pytest.mark.parametrize("event", [Cleared(), None])
def test_a_guess_is_void_when_the_worker_lost_everything(event: Event | None) -> None:
    fleet = fleet_of()
    fleet.receive(batch(0), 0.0)
    fleet.expect("w", CHAIN, 2, 0.0)
    fleet.receive(batch(1, event) if event is not None else batch(0, epoch=2), 0.0)
    assert (hit(fleet), fleet.guesses.fates) == (0, fates(made=1, denied=1))


def test_there_are_only_so_many_guesses() -> None:
    fleet = fleet_of(SyncLimits(max_guesses=2))
    for index in range(3):
        fleet.expect("w", CHAIN, index, 0.0)
    assert [index for index, _ in fleet.guesses.on_chain(CHAIN)] == [1, 2]
    assert fleet.guesses.fates == fates(made=3, expired=1)


def test_every_guess_that_was_made_is_open_or_has_one_fate() -> None:
    fleet = fleet_of(SyncLimits(guess_s=10.0))
    other = Chain(b"tenant", CHAIN.hashes)
    assert [fleet.expect("w", CHAIN, 0, now_s) for now_s in (0.0, 1.0)] == [True, False], "renewed, not made"
    fleet.expect("w", CHAIN, 1, 1.0)
    fleet.guesses.take_back("w", CHAIN, 0)
    fleet.receive(batch(0, *HELD), 1.0)
    fleet.expect("w", other, 0, 2.0)
    fleet.hits(other, 12.0)
    fleet.expect("w", other, 1, 12.0)
    fleet.expect("w", other, 2, 13.0)
    assert (len(fleet.guesses), fleet.guesses.fates) == (2, fates(made=5, confirmed=1, expired=1, taken_back=1))
    fleet.remove_worker("w")
    assert (len(fleet.guesses), fleet.guesses.fates) == (0, fates(5, confirmed=1, expired=1, denied=2, taken_back=1))


def test_what_nobody_sent_or_nobody_could_is_dropped_and_counted() -> None:
    fleet = fleet_of()
    for message in (Batch("stranger", 0, 0, HELD), batch(-1, *HELD), batch(0, *HELD, epoch=-1), snapshot(-2, 0, *HELD)):
        fleet.receive(message, 0.0)
    fleet.settle()
    assert (hit(fleet), fleet.stats.num_unknown_workers, fleet.stats.num_malformed) == (0, 1, 3)
    assert fleet.sync("w").received_s is None
    with pytest.raises(KeyError, match="stranger"):
        fleet.expect("stranger", CHAIN, 0, 0.0)
    with pytest.raises(ValueError, match="got 3"):
        fleet.expect("w", CHAIN, 3, 0.0)
    with pytest.raises(ValueError, match="guess_s must be above 0, got 0"):
        SyncLimits(guess_s=0)


def test_a_worker_that_is_removed_is_gone_at_once() -> None:
    fleet = fleet_of()
    fleet.receive(batch(0, *HELD), 7.0)
    fleet.expect("w", CHAIN, 2, 7.0)
    assert fleet.sync("w").received_s == 7.0
    fleet.remove_worker("w")
    assert fleet.hits(CHAIN, 7.0) == {}
    fleet.settle()
    assert fleet.index.num_blocks == 0
    fleet.index.check_invariants()


def stored(first: int, number: int) -> KvStored:
    return KvStored(tuple(range(first, first + number)), None, b"", BLOCK_TOKENS)


def test_turnover_is_what_a_worker_lately_removed_over_what_it_stored() -> None:
    fleet = Fleet(FleetIndex(BLOCK_TOKENS))
    fleet.add_worker("a")
    assert fleet.sync("a").turnover.share == 0.0
    for number in range(10):
        fleet.receive(Batch("a", 1, number, (stored(100 * number, 100),)), 0.0)
    assert fleet.sync("a").turnover.share == 0.0, "there was room"
    for number in range(10, 60):
        removed = KvRemoved(tuple(range(100 * (number - 10), 100 * (number - 9))))
        fleet.receive(Batch("a", 1, number, (stored(100 * number, 100), removed)), 0.0)
    assert fleet.sync("a").turnover.share > 0.95, "all that is stored takes the place of something else"
    fleet.receive(Batch("a", 2, 0, (stored(0, 10),)), 0.0)
    assert fleet.sync("a").turnover.share == 0.0, "it began anew, and is empty"
