"""From a publisher to a router: numbered batches, replays, snapshots, and what is refused."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="the router extra is not installed: pip install '.[router]'")
pytest.importorskip("msgspec", reason="the router extra is not installed: pip install '.[router]'")

import zmq
import zmq.auth

from marconi.events.address import Keys
from marconi.events.base import Batch, Cleared, FreeMemory, KvStored, ReplayEnd, Snapshot, StateStored, WorkerLoad
from marconi.events.codec import Encoder, Published
from marconi.events.publisher import Publisher
from marconi.router.subscriber import Dropped, Message, Subscriber, WorkerSockets
from marconi.router.sync import State, SyncLimits

from .wire import BLOCK_TOKENS, WORKER, Router, Script, is_snapshot, outlet, publish


def block(number: int) -> KvStored:
    return KvStored((number,), None, b"", BLOCK_TOKENS)


def numbers(messages: list[Message]) -> list[int]:
    """Of the blocks that batches brought, in order."""
    return [
        event.block_hashes[0]
        for message in messages
        if isinstance(message, Batch)
        for event in message.events
        if isinstance(event, KvStored)
    ]


@pytest.fixture
def source() -> Script:
    return Script()


@pytest.fixture
def router() -> Iterator[Router]:
    router = Router()
    yield router
    router.close()


@pytest.fixture
def publisher(source: Script, tmp_path: Path) -> Iterator[Publisher]:
    publisher = publish(source, outlet(tmp_path))
    yield publisher
    publisher.close()


def test_events_come_in_order_in_batches_of_at_most_512_without_a_gap(
    source: Script, publisher: Publisher, router: Router
) -> None:
    router.add(publisher.options)
    router.connect(source)
    source.waiting.extend(block(number) for number in range(2_000))
    messages = router.receive(lambda came: len(numbers(came)) == 2_000)
    assert numbers(messages) == list(range(2_000))
    batches = [message for message in messages if isinstance(message, Batch)]
    assert max(len(batch.events) for batch in batches) == 512
    first = batches[0].sequence
    assert [batch.sequence for batch in batches] == list(range(first, first + len(batches)))
    assert {(batch.worker, batch.epoch) for batch in batches} == {(WORKER, publisher.epoch)}
    assert not router.fleet.stats.num_gaps


def test_512_events_are_sent_before_the_period_is_over(source: Script, router: Router, tmp_path: Path) -> None:
    # The period never ends: what waits is sent because it is many.
    publisher = publish(source, outlet(tmp_path, period_s=1e6, max_events=512))
    router.add(publisher.options)
    router.receive(is_snapshot)
    source.waiting.extend(block(number) for number in range(511))
    assert router.poll(0.3) == []
    source.waiting.append(block(511))
    messages = router.receive(lambda came: len(numbers(came)) == 512)
    publisher.close()
    assert numbers(messages) == list(range(512))


def test_a_new_router_gets_a_snapshot_and_another_each_period(source: Script, publisher: Publisher) -> None:
    source.everything = (block(1), StateStored(1, 64, b"ns"))
    router = Router(limits=SyncLimits(snapshot_period_s=0.05))
    router.add(publisher.options)
    messages = router.receive(lambda came: len(came) >= 3)
    router.close()
    assert all(isinstance(message, Snapshot) and message.events == source.everything for message in messages)


def test_a_snapshot_is_numbered_and_made_anew_only_when_something_was_told(
    source: Script, publisher: Publisher, router: Router
) -> None:
    router.add(publisher.options)
    router.connect(source)
    router.subscriber.request(WORKER, None)
    router.subscriber.request(WORKER, None)
    first, second = [
        each for each in router.receive(lambda came: sum(map(_is_snapshot, came)) >= 2) if _is_snapshot(each)
    ][-2:]
    assert first == second
    num_walks = source.num_walks
    source.waiting.append(block(1))
    router.receive(lambda came: numbers(came) == [1])
    router.subscriber.request(WORKER, None)
    (third,) = router.receive(is_snapshot)
    assert isinstance(third, Snapshot)
    assert isinstance(second, Snapshot)
    assert (third.number, third.sequence) > (second.number, second.sequence)
    assert source.num_walks == num_walks + 1


def _is_snapshot(message: Message) -> bool:
    return isinstance(message, Snapshot)


def test_a_snapshot_says_what_is_held_after_its_batch(source: Script, publisher: Publisher, router: Router) -> None:
    router.add(publisher.options)
    router.receive(is_snapshot)
    router.connect(source)
    # Waits when the question comes: told first.
    source.waiting.append(block(5))
    source.everything = (block(5),)
    router.subscriber.request(WORKER, None)
    messages = router.receive(lambda came: is_snapshot(came) and numbers(came) == [5])
    told = next(message for message in messages if numbers([message]) == [5])
    held = next(message for message in messages if isinstance(message, Snapshot))
    assert held.sequence >= told.sequence


def test_lost_batches_are_replayed(source: Script, router: Router, tmp_path: Path) -> None:
    lost: set[int] = set()
    publisher = publish(source, outlet(tmp_path, max_events=1), lost)
    router.add(publisher.options)
    router.connect(source)
    start = publisher.sequence + 10
    lost.update({start + 1, start + 2, start + 3})
    source.waiting.extend(block(number) for number in range(40))
    messages = router.receive(lambda came: set(numbers(came)) == set(range(40)))
    publisher.close()
    assert router.fleet.stats.num_gaps == 1
    assert router.held() == set(range(40))
    came = [message.sequence for message in messages if isinstance(message, Batch)]
    assert lost <= set(came)
    assert came.index(start + 4) < came.index(start + 1), "it was not lost"
    assert not is_snapshot(messages)


def test_a_replay_begins_at_any_batch_and_says_where_it_ends(
    source: Script, publisher: Publisher, router: Router
) -> None:
    router.add(publisher.options)
    router.connect(source)
    source.waiting.extend(block(number) for number in range(3))
    messages = router.receive(lambda came: numbers(came) == [0, 1, 2])
    first = next(each for each in messages if isinstance(each, Batch) and 0 in numbers([each]))
    router.subscriber.request(WORKER, first.sequence)
    again = router.receive(lambda came: ReplayEnd(WORKER) in came)
    assert [each for each in messages if numbers([each])] == [each for each in again if numbers([each])]
    assert again[-1] == ReplayEnd(WORKER)
    with pytest.raises(KeyError):
        router.subscriber.request("nobody", 0)


def loads(messages: list[Message]) -> list[tuple[int, int]]:
    """Requests running and free tokens, of the batches that tell a load."""
    told = [message.load for message in messages if isinstance(message, Batch) and message.load is not None]
    return [(load.num_running, load.memory.free_tokens) for load in told if load.memory is not None]


def running(num_requests: int, free_tokens: int = 0) -> WorkerLoad:
    return WorkerLoad(num_requests, 0, 8, 0, FreeMemory(free_tokens, 0, 0, 0))


def test_a_load_is_sent_when_requests_come_or_end_and_once_when_there_are_none(
    source: Script, publisher: Publisher, router: Router
) -> None:
    router.add(publisher.options)
    router.connect(source)
    messages: list[Message] = []
    for load in (running(1), running(2), running(0), running(0)):
        publisher.publish_load(load)
        source.waiting.append(block(load.num_running))
        messages += router.receive(lambda came, load=load: numbers(came) == [load.num_running])  # type: ignore[misc]
    messages += router.poll(0.1)
    # A slow machine may send one twice while the worker is busy.
    assert [load for load, _ in groupby(loads(messages))] == [(1, 0), (2, 0), (0, 0)]
    assert loads(messages).count((0, 0)) == 1
    told = router.fleet.sync(WORKER).load_report
    assert told is not None
    assert told.load.num_running == 0
    assert told.made_s <= told.received_s


def test_the_load_of_a_busy_worker_is_sent_again_after_a_while_and_with_it_what_memory_is_free(
    source: Script, publisher: Publisher, router: Router
) -> None:
    router.add(publisher.options)
    router.connect(source)
    publisher.publish_load(running(1, free_tokens=9))
    router.receive(lambda came: (1, 9) in loads(came))
    publisher.publish_load(running(1, free_tokens=5))
    messages = router.receive(lambda came: loads(came).count((1, 5)) >= 2)
    told = [each.load for each in messages if isinstance(each, Batch) and each.load is not None]
    first, second = [load.age_s for load in told if load.memory == FreeMemory(5, 0, 0, 0)][:2]
    assert second > first, "it was so then, and not now"


def test_the_load_of_a_batch_that_is_replayed_is_dropped(source: Script, publisher: Publisher, router: Router) -> None:
    router.add(publisher.options)
    router.connect(source)
    publisher.publish_load(running(1))
    messages = router.receive(lambda came: (1, 0) in loads(came))
    publisher.publish_load(running(0))
    router.receive(lambda came: (0, 0) in loads(came))
    first = next(each.sequence for each in messages if isinstance(each, Batch) and each.load is not None)
    router.subscriber.request(WORKER, first)
    again = router.receive(lambda came: ReplayEnd(WORKER) in came)
    assert first in [each.sequence for each in again if isinstance(each, Batch)]
    assert not loads(again)


def test_a_source_that_fails_ends_the_publisher_and_is_closed(
    source: Script, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Sequence[Published]:
        raise AssertionError("a tree that cannot be")

    source.drain = fail  # type: ignore[method-assign]
    publisher._thread.join(10)
    assert (publisher.is_publishing, source.is_closed) == (False, True)
    assert [record.message for record in caplog.records] == [f"marconi: events of {WORKER} end here"]
    publisher.close()


def test_a_gap_that_the_worker_cannot_replay_is_closed_by_a_snapshot(
    source: Script, router: Router, tmp_path: Path
) -> None:
    lost: set[int] = set()
    publisher = publish(source, outlet(tmp_path, max_events=1, max_replay_batches=2), lost)
    router.add(publisher.options)
    router.connect(source)
    source.everything = (block(99),)
    start = publisher.sequence + 1
    lost.update(range(start, start + 30))
    source.waiting.extend(block(number) for number in range(40))
    messages = router.receive(is_snapshot)
    publisher.close()
    snapshot = next(message for message in messages if isinstance(message, Snapshot))
    assert snapshot.events == source.everything
    assert snapshot.sequence >= start + 30
    router.receive(lambda _: router.fleet.sync(WORKER).state is State.CURRENT)
    assert 99 in router.held()


def test_batches_published_before_the_router_subscribed_are_in_its_snapshot(
    source: Script, publisher: Publisher, router: Router
) -> None:
    source.waiting.extend(block(number) for number in range(5))
    source.everything = tuple(block(number) for number in range(5))
    router.add(publisher.options)
    (held, *_) = (each for each in router.receive(is_snapshot) if isinstance(each, Snapshot))
    assert held.events == source.everything
    assert held.sequence >= 0


def test_a_worker_that_starts_again_has_a_later_epoch_and_sends_a_snapshot_of_it(
    source: Script, router: Router, tmp_path: Path
) -> None:
    first = publish(source, outlet(tmp_path))
    router.add(first.options)
    router.connect(source)
    first.close()
    second = publish(Script(), outlet(tmp_path))
    anew = Script()
    second._source = anew
    anew.everything = (block(7),)

    def has_come(came: list[Message]) -> bool:
        anew.waiting.append(Cleared())
        return any(isinstance(each, Snapshot) and each.epoch == second.epoch for each in came)

    messages = router.receive(has_come)
    second.close()
    assert second.epoch > first.epoch
    assert any(isinstance(each, Snapshot) and each.events == (block(7),) for each in messages)


def test_what_cannot_be_read_is_dropped_and_counted_and_the_socket_stays(router: Router, tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as worker:
        worker.bind(f"ipc://{tmp_path}/e")
        router.add(outlet(tmp_path))
        good = Encoder(BLOCK_TOKENS).batch(WORKER, 1, [Published(block(1))], 0.0)
        other = Encoder(BLOCK_TOKENS).batch("127.0.0.1:30002", 1, [Published(block(2))], 0.0)
        snapshot = Encoder(BLOCK_TOKENS).snapshot(WORKER, 1, 0, (), 0.0)
        number = (0).to_bytes(8, "big")
        bad = [
            [b"", number, b"\xc1"], [b"", number, good[:-1]], [b"", b"short", good], [b"only"],
            [b"", number, good, b"more"], [b"", number, snapshot],
        ]  # fmt: skip

        def tell(came: list[Message]) -> bool:
            for frames in [*bad, [b"", number, other], [b"", number, good]]:
                worker.send_multipart(frames)
            return len(came) >= 2

        messages = router.receive(tell)
    assert set(numbers(messages)) == {1}
    dropped = router.subscriber.stats.dropped
    assert dropped[Dropped.MALFORMED] >= len(bad)
    assert dropped[Dropped.UNKNOWN_WORKER] >= 1
    assert len(messages) >= 2


def test_questions_that_make_no_sense_are_not_answered_and_those_of_others_are(
    source: Script, publisher: Publisher, router: Router
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger, context.socket(zmq.DEALER) as flood:
        flood.linger = 0
        for each in (stranger, flood):
            each.connect(publisher.options.replay)
        flood.send_multipart([b"", b"\xff" * 100_000])
        for frames in ([b""], [b"", b"?"], [b"x", b"\0" * 8], [b"", b"", b""]):
            stranger.send_multipart(frames)
        stranger.send_multipart([b"", (0).to_bytes(8, "big")])
        assert stranger.poll(10_000)
        assert stranger.recv_multipart()[2] == b"\xff" * 8
    router.add(publisher.options)
    assert is_snapshot(router.receive(is_snapshot))
    assert publisher.is_publishing


def test_only_the_fleet_gets_past_the_keys(source: Script, tmp_path: Path) -> None:
    ours, theirs = (Keys.read(Path(zmq.auth.create_certificates(tmp_path, name)[1])) for name in ("fleet", "stranger"))
    stranger_keys = Keys(ours.public, theirs.secret)
    publisher = publish(source, outlet(tmp_path, keys=ours))
    friend, stranger, bare, forger = (Router(Subscriber(keys)) for keys in (ours, theirs, None, stranger_keys))
    for each in (stranger, bare, forger, friend):
        each.add(publisher.options)
    friend.connect(source)
    for each in (stranger, bare, forger):
        assert each.poll(0.2) == []
    for each in (friend, stranger, bare, forger):
        each.close()
    publisher.close()


def test_an_address_in_use_and_one_that_others_reach_are_refused_in_one_line(
    source: Script, router: Router, tmp_path: Path
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        at = outlet(tmp_path)
        busy = type(at)(WORKER, f"tcp://127.0.0.1:{port}", at.replay, BLOCK_TOKENS)
        with pytest.raises(ValueError, match=f"^tcp://127.0.0.1:{port}: Address already in use$"):
            Publisher(source, busy)
    with pytest.raises(ValueError, match="other hosts reach it"):
        type(at)(WORKER, "tcp://*:5557", at.replay, BLOCK_TOKENS)
    with pytest.raises(ValueError, match="other hosts reach it"):
        router.subscriber.add(WorkerSockets(WORKER, "tcp://10.0.0.1:5557", "tcp://127.0.0.1:5558"))


def test_a_worker_is_added_once_and_removed_for_good(source: Script, publisher: Publisher, router: Router) -> None:
    router.add(publisher.options)
    with pytest.raises(ValueError, match=f"a worker's name must be new, got '{WORKER}' twice"):
        router.add(publisher.options)
    router.connect(source)
    router.subscriber.remove(WORKER)
    assert router.subscriber.workers == []
    source.waiting.append(block(1))
    assert router.poll(0.2) == []
    with pytest.raises(KeyError):
        router.subscriber.request(WORKER, None)


def test_a_subscriber_without_workers_waits_as_long_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("marconi.router.subscriber.time.sleep", slept.append)
    subscriber = Subscriber()
    try:
        assert subscriber.poll(0.25) == []
    finally:
        subscriber.close()
    assert slept == [0.25]
