"""From a publisher to a subscriber: numbered batches, what was lost asked for again, snapshots, and what is refused."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("zmq", reason="the router extra is not installed: pip install '.[router]'")
pytest.importorskip("msgspec", reason="the router extra is not installed: pip install '.[router]'")

import zmq
import zmq.auth

from marconi.router.events.address import Keys
from marconi.router.events.base import Batch, Cleared, KvStored, Snapshot, StateStored
from marconi.router.events.codec import Encoder, Told
from marconi.router.events.publisher import Publisher
from marconi.router.events.subscriber import Dropped, Message, Subscriber, WorkerSockets

from .wire import BLOCK_TOKENS, WORKER, Script, connect, is_snapshot, listen, outlet, publish, sockets


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
def subscriber() -> Iterator[Subscriber]:
    subscriber = Subscriber(snapshot_period_s=1e6)
    yield subscriber
    subscriber.close()


@pytest.fixture
def publisher(source: Script, tmp_path: Path) -> Iterator[Publisher]:
    publisher = publish(source, outlet(tmp_path))
    yield publisher
    publisher.close()


def test_events_come_in_order_in_batches_of_at_most_512_without_a_gap(
    source: Script, publisher: Publisher, subscriber: Subscriber
) -> None:
    subscriber.add(sockets(publisher.outlet))
    connect(subscriber, source)
    source.waiting.extend(block(number) for number in range(2_000))
    messages = listen(subscriber, lambda came: len(numbers(came)) == 2_000)
    assert numbers(messages) == list(range(2_000))
    batches = [message for message in messages if isinstance(message, Batch)]
    assert max(len(batch.events) for batch in batches) == 512
    first = batches[0].sequence
    assert [batch.sequence for batch in batches] == list(range(first, first + len(batches)))
    assert {(batch.worker, batch.epoch) for batch in batches} == {(WORKER, publisher.epoch)}
    assert not subscriber.counts.num_gaps


def test_512_events_are_sent_before_the_period_is_over(source: Script, subscriber: Subscriber, tmp_path: Path) -> None:
    # The period never ends: what waits is sent because it is many.
    publisher = publish(source, outlet(tmp_path, period_s=1e6, max_events=512))
    subscriber.add(sockets(publisher.outlet))
    listen(subscriber, is_snapshot)
    source.waiting.extend(block(number) for number in range(511))
    assert subscriber.poll(0.3) == []
    source.waiting.append(block(511))
    messages = listen(subscriber, lambda came: len(numbers(came)) == 512)
    publisher.close()
    assert numbers(messages) == list(range(512))


def test_a_new_listener_gets_a_snapshot_and_another_each_period(source: Script, publisher: Publisher) -> None:
    source.everything = (block(1), StateStored(1, 64, b"ns"))
    subscriber = Subscriber(snapshot_period_s=0.05)
    subscriber.add(sockets(publisher.outlet))
    messages = listen(subscriber, lambda came: len(came) >= 3)
    subscriber.close()
    assert all(isinstance(message, Snapshot) and message.events == source.everything for message in messages)


def test_a_snapshot_is_numbered_and_made_anew_only_when_something_was_told(
    source: Script, publisher: Publisher, subscriber: Subscriber
) -> None:
    subscriber.add(sockets(publisher.outlet))
    connect(subscriber, source)
    subscriber.ask_snapshot(WORKER)
    subscriber.ask_snapshot(WORKER)
    first, second = [
        each for each in listen(subscriber, lambda came: sum(map(_is_snapshot, came)) >= 2) if _is_snapshot(each)
    ][-2:]
    assert first == second
    num_walks = source.num_walks
    source.waiting.append(block(1))
    listen(subscriber, lambda came: numbers(came) == [1])
    subscriber.ask_snapshot(WORKER)
    (third,) = listen(subscriber, is_snapshot)
    assert isinstance(third, Snapshot)
    assert isinstance(second, Snapshot)
    assert (third.number, third.sequence) > (second.number, second.sequence)
    assert source.num_walks == num_walks + 1


def _is_snapshot(message: Message) -> bool:
    return isinstance(message, Snapshot)


def test_a_snapshot_says_what_is_held_after_its_batch(
    source: Script, publisher: Publisher, subscriber: Subscriber
) -> None:
    subscriber.add(sockets(publisher.outlet))
    listen(subscriber, is_snapshot)
    connect(subscriber, source)
    # Waits when the question comes: told first.
    source.waiting.append(block(5))
    source.everything = (block(5),)
    subscriber.ask_snapshot(WORKER)
    messages = listen(subscriber, lambda came: is_snapshot(came) and numbers(came) == [5])
    told = next(message for message in messages if numbers([message]) == [5])
    held = next(message for message in messages if isinstance(message, Snapshot))
    assert held.sequence >= told.sequence


def test_lost_batches_are_asked_for_again(source: Script, subscriber: Subscriber, tmp_path: Path) -> None:
    lost: set[int] = set()
    publisher = publish(source, outlet(tmp_path, max_events=1), lost)
    subscriber.add(sockets(publisher.outlet))
    connect(subscriber, source)
    listen(subscriber, lambda _: not source.waiting)
    start = publisher.sequence + 10
    lost.update({start + 1, start + 2, start + 3})
    source.waiting.extend(block(number) for number in range(40))
    messages = listen(subscriber, lambda came: set(numbers(came)) == set(range(40)))
    publisher.close()
    assert subscriber.counts.num_gaps == 1
    came = [message.sequence for message in messages if isinstance(message, Batch)]
    assert lost <= set(came)
    assert came.index(start + 4) < came.index(start + 1), "it was not lost"


def test_batches_are_asked_for_again_at_any_time(source: Script, publisher: Publisher, subscriber: Subscriber) -> None:
    subscriber.add(sockets(publisher.outlet))
    connect(subscriber, source)
    listen(subscriber, lambda _: not source.waiting)
    source.waiting.extend(block(number) for number in range(3))
    messages = listen(subscriber, lambda came: numbers(came) == [0, 1, 2])
    first = next(each.sequence for each in messages if 0 in numbers([each]))
    num_snapshots = subscriber.counts.num_snapshots_asked
    subscriber.ask_again(WORKER, first)
    again = listen(subscriber, lambda came: numbers(came) == [0, 1, 2])
    assert [each for each in messages if numbers([each])] == [each for each in again if numbers([each])]
    subscriber.poll(0.1)
    assert subscriber.counts.num_snapshots_asked == num_snapshots
    with pytest.raises(KeyError):
        subscriber.ask_again("nobody", 0)
    with pytest.raises(ValueError, match="batch -1; a number from 0 on is right"):
        subscriber.ask_again(WORKER, -1)


def test_what_is_asked_for_again_and_gone_comes_as_a_snapshot(
    source: Script, subscriber: Subscriber, tmp_path: Path
) -> None:
    publisher = publish(source, outlet(tmp_path, max_events=1, max_replay_batches=2))
    subscriber.add(sockets(publisher.outlet))
    listen(subscriber, is_snapshot)
    connect(subscriber, source)
    listen(subscriber, lambda _: not source.waiting)
    source.waiting.extend(block(number) for number in range(10))
    listen(subscriber, lambda came: numbers(came) == list(range(10)))
    source.everything = (block(9),)
    source.waiting.append(Cleared())
    subscriber.ask_again(WORKER, 0)
    held = next(each for each in listen(subscriber, is_snapshot) if isinstance(each, Snapshot))
    publisher.close()
    assert held.events == source.everything


def test_a_source_that_fails_ends_the_telling_and_is_told_so(
    source: Script, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> Sequence[Told]:
        raise AssertionError("a tree that cannot be")

    source.drain = fail  # type: ignore[method-assign]
    publisher._thread.join(10)
    assert (publisher.is_telling, source.is_closed) == (False, True)
    assert [record.message for record in caplog.records] == [f"marconi: events of {WORKER} end here"]
    publisher.close()


def test_a_gap_that_the_worker_has_no_more_brings_a_snapshot(
    source: Script, subscriber: Subscriber, tmp_path: Path
) -> None:
    lost: set[int] = set()
    publisher = publish(source, outlet(tmp_path, max_events=1, max_replay_batches=2), lost)
    subscriber.add(sockets(publisher.outlet))
    listen(subscriber, is_snapshot)
    connect(subscriber, source)
    listen(subscriber, lambda _: not source.waiting)
    source.everything = (block(99),)
    start = publisher.sequence + 1
    lost.update(range(start, start + 30))
    source.waiting.extend(block(number) for number in range(40))
    messages = listen(subscriber, is_snapshot)
    publisher.close()
    held = next(message for message in messages if isinstance(message, Snapshot))
    assert held.events == source.everything
    assert held.sequence >= start + 30


def test_batches_that_went_before_the_subscriber_listened_are_in_its_snapshot(
    source: Script, publisher: Publisher, subscriber: Subscriber
) -> None:
    source.waiting.extend(block(number) for number in range(5))
    source.everything = tuple(block(number) for number in range(5))
    subscriber.add(sockets(publisher.outlet))
    (held, *_) = (each for each in listen(subscriber, is_snapshot) if isinstance(each, Snapshot))
    assert held.events == source.everything
    assert held.sequence >= 0


def test_a_worker_that_starts_again_has_a_later_epoch_and_is_asked_for_a_snapshot(
    source: Script, subscriber: Subscriber, tmp_path: Path
) -> None:
    first = publish(source, outlet(tmp_path))
    subscriber.add(sockets(first.outlet))
    connect(subscriber, source)
    first.close()
    second = publish(Script(), outlet(tmp_path))
    anew = Script()
    second._source = anew
    anew.everything = (block(7),)
    messages: list[Message] = []

    def has_come(came: list[Message]) -> bool:
        anew.waiting.append(Cleared())
        return any(isinstance(each, Snapshot) and each.epoch == second.epoch for each in came)

    messages = listen(subscriber, has_come)
    second.close()
    assert second.epoch > first.epoch
    assert any(isinstance(each, Snapshot) and each.events == (block(7),) for each in messages)


def test_what_cannot_be_read_is_dropped_and_counted_and_the_socket_stays(
    subscriber: Subscriber, tmp_path: Path
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as worker:
        worker.bind(f"ipc://{tmp_path}/e")
        subscriber.add(WorkerSockets(WORKER, f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"))
        good = Encoder(BLOCK_TOKENS).batch(WORKER, 1, [Told(block(1))], 0.0)
        other = Encoder(BLOCK_TOKENS).batch("127.0.0.1:30002", 1, [Told(block(2))], 0.0)
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

        messages = listen(subscriber, tell)
    assert set(numbers(messages)) == {1}
    dropped = subscriber.counts.dropped
    assert dropped[Dropped.MALFORMED] >= len(bad)
    assert dropped[Dropped.UNKNOWN_WORKER] >= 1
    assert len(messages) >= 2


def test_questions_that_make_no_sense_are_not_answered_and_those_of_others_are(
    source: Script, publisher: Publisher, subscriber: Subscriber
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger, context.socket(zmq.DEALER) as flood:
        flood.linger = 0
        for each in (stranger, flood):
            each.connect(publisher.outlet.replay)
        flood.send_multipart([b"", b"\xff" * 100_000])
        for frames in ([b""], [b"", b"?"], [b"x", b"\0" * 8], [b"", b"", b""]):
            stranger.send_multipart(frames)
        stranger.send_multipart([b"", (0).to_bytes(8, "big")])
        assert stranger.poll(10_000)
        assert stranger.recv_multipart()[2] == b"\xff" * 8
    subscriber.add(sockets(publisher.outlet))
    assert is_snapshot(listen(subscriber, is_snapshot))
    assert publisher.is_telling


def test_only_the_fleet_gets_past_the_keys(source: Script, tmp_path: Path) -> None:
    ours, theirs = (Keys.read(Path(zmq.auth.create_certificates(tmp_path, name)[1])) for name in ("fleet", "stranger"))
    stranger_keys = Keys(ours.public, theirs.secret)
    publisher = publish(source, outlet(tmp_path, keys=ours))
    friend, stranger, bare = Subscriber(ours), Subscriber(theirs), Subscriber()
    forger = Subscriber(stranger_keys)
    for each in (stranger, bare, forger, friend):
        each.add(sockets(publisher.outlet))
    connect(friend, source)
    for each in (stranger, bare, forger):
        assert each.poll(0.2) == []
    for each in (friend, stranger, bare, forger):
        each.close()
    publisher.close()


def test_an_address_in_use_and_one_that_others_reach_are_refused_in_one_line(
    source: Script, subscriber: Subscriber, tmp_path: Path
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
        subscriber.add(WorkerSockets(WORKER, "tcp://10.0.0.1:5557", "tcp://127.0.0.1:5558"))


def test_a_worker_is_added_once_and_removed_for_good(
    source: Script, publisher: Publisher, subscriber: Subscriber
) -> None:
    subscriber.add(sockets(publisher.outlet))
    with pytest.raises(ValueError, match=f"{WORKER}: there is a worker of this name already"):
        subscriber.add(sockets(publisher.outlet))
    connect(subscriber, source)
    subscriber.remove(WORKER)
    assert subscriber.workers == []
    source.waiting.append(block(1))
    assert subscriber.poll(0.2) == []
    with pytest.raises(KeyError):
        subscriber.ask_snapshot(WORKER)


def test_a_source_that_fails_ends_the_telling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Script):
        def drain(self) -> list[Told]:
            raise AssertionError("out of step")

    publisher = publish(Broken(), outlet(tmp_path))
    publisher._thread.join(10)
    assert not publisher.is_telling
    assert f"events of {WORKER} end here" in caplog.text


def test_a_subscriber_without_workers_waits_as_long_as_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("marconi.router.events.subscriber.time.sleep", slept.append)
    subscriber = Subscriber()
    try:
        assert subscriber.poll(0.25) == []
    finally:
        subscriber.close()
    assert slept == [0.25]
