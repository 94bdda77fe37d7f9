"""From workers' sockets into the fleet's index, without a user's request waiting for it.

    worker   SUB       batches to all
             DEALER    requests: the batches of a replay and its end, or a snapshot
    thread   Subscriber.poll: sockets, msgpack                      passes on lists of messages
    loop     Fleet.receive, then Fleet.work a piece at a time       passes on what `Fleet.requests` says

Each worker has sockets of its own, so where a payload came from shows which worker sent it; one that names another
worker is dropped and counted. What cannot be read is dropped and counted, and the socket stays. Messages are passed on
late, twice or out of order, as networks have it: repairs are `sync`'s. The load of a batch that is replayed is old, and
is dropped.

A worker has a name of its own in its events; the fleet knows it by another, its URL. Sockets belong to the thread, so
requests are passed there as calls and are made at its next turn.

No error ends this: the thread closes its sockets and connects anew, the loop forgets what workers hold, and snapshots
bring it back. Until that has worked, `EventFeed.why_not_fed` says why the index is not to be believed.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import zmq

from marconi.events.address import Keys, require_private
from marconi.events.base import Batch, ReplayEnd, Snapshot
from marconi.events.codec import Decoder, Limits, Malformed
from marconi.events.publisher import END, SNAPSHOT
from marconi.router.sync import Fleet, State

logger = logging.getLogger(__name__)

Message: TypeAlias = Batch | Snapshot | ReplayEnd
_MAX_AT_ONCE: Final = 64
"""Messages of one socket before the next socket's turn."""
_MAX_RECEIVED: Final = 100_000
"""Messages of one socket that wait for `poll`; ZMQ drops more."""
_MAX_REQUESTS: Final = 4
"""Requests that wait for a worker that is away; more are dropped."""
_POLL_S: Final = 0.02
_REQUEST_S: Final = 0.1
"""Time between two looks at what to request, where nothing arrives."""
_RETRY_S: Final = 0.1
_MAX_RETRY_S: Final = 5.0
"""Time between two attempts to connect anew, doubled from the first to the second."""
_SILENT_S: Final = 10.0
"""A thread that took no turn for so long hangs."""


class Dropped(StrEnum):
    """Why a message was not passed on."""

    MALFORMED = "malformed"
    UNKNOWN_WORKER = "unknown-worker"


@dataclass(frozen=True, slots=True)
class WorkerSockets:
    """The addresses at which a worker publishes, and its name in its events."""

    worker: str
    events: str
    replay: str


@dataclass(slots=True)
class SubscriberStats:
    """Counters of messages and requests since the subscriber was made."""

    num_messages: int = 0
    num_replay_requests: int = 0
    num_snapshot_requests: int = 0
    dropped: Counter[Dropped] = field(default_factory=Counter)


class _Sockets(NamedTuple):
    """The sockets to one worker."""

    events: "zmq.Socket[bytes]"
    requests: "zmq.Socket[bytes]"


class Subscriber:
    """Subscribes to workers that come and go. Owned by the one thread that calls `poll`."""

    def __init__(self, keys: Keys | None = None, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        self.stats = SubscriberStats()
        self._keys = keys
        self._limits = limits
        self._decoder = Decoder(limits)
        self._workers: dict[str, WorkerSockets] = {}
        self._open()

    def _open(self) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[str, _Sockets] = {}

    def add(self, sockets: WorkerSockets) -> None:
        """Subscribe to a worker; `ValueError` for a name that is there, or an address that needs keys."""
        if sockets.worker in self._workers:
            raise ValueError(f"a worker's name must be new, got {sockets.worker!r} twice")
        for address in (sockets.events, sockets.replay):
            require_private(address, self._keys)
        self._subscribe(sockets)
        self._workers[sockets.worker] = sockets

    def reconnect(self) -> None:
        """Close all sockets, and subscribe anew to the same workers; after an error it can be called again."""
        self.close()
        self._open()
        for sockets in self._workers.values():
            self._subscribe(sockets)

    def _subscribe(self, sockets: WorkerSockets) -> None:
        events, requests = self._connect(zmq.SUB, sockets.events), self._connect(zmq.DEALER, sockets.replay)
        events.subscribe(b"")
        self._sockets[sockets.worker] = _Sockets(events, requests)

    def remove(self, worker: str) -> None:
        """Unsubscribe from a worker; `KeyError` for one that is not known."""
        del self._workers[worker]
        for socket in self._sockets.pop(worker):
            self._poller.unregister(socket)
            socket.close(linger=0)

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)

    @property
    def workers(self) -> list[str]:
        """The names of the workers that it is subscribed to."""
        return list(self._workers)

    def request(self, worker: str, first_batch: int | None) -> None:
        """Request a replay from `first_batch` on, or a snapshot; dropped where too many requests wait.

        `KeyError` for a worker that is not known.
        """
        frames = (b"", SNAPSHOT if first_batch is None else first_batch.to_bytes(8, "big"))
        self.stats.num_snapshot_requests += first_batch is None
        self.stats.num_replay_requests += first_batch is not None
        with suppress(zmq.Again):
            self._sockets[worker].requests.send_multipart(frames, zmq.DONTWAIT)

    def poll(self, timeout_s: float) -> list[Message]:
        """Take the messages that have arrived, after waiting `timeout_s` at most for the first."""
        if not self._sockets:
            # ZMQ does not wait where there is no socket.
            time.sleep(max(timeout_s, 0.0))
            return []
        ready = dict(self._poller.poll(max(int(timeout_s * 1000), 0)))
        messages: list[Message] = []
        for worker, sockets in self._sockets.items():
            if sockets.events in ready:
                for frames in _received(sockets.events):
                    batch = self._read(worker, frames[1:])
                    if isinstance(batch, Snapshot):
                        self.stats.dropped[Dropped.MALFORMED] += 1
                    elif batch is not None:
                        messages.append(batch)
            if sockets.requests in ready:
                for frames in _received(sockets.requests):
                    is_end = frames[1:] == [b"", END, b""]
                    answer = ReplayEnd(worker) if is_end else self._read(worker, frames[2:])
                    if isinstance(answer, Batch) and answer.load is not None:
                        answer = replace(answer, load=None)
                    if answer is not None:
                        messages.append(answer)
        return messages

    def _connect(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.ipv6 = "[" in address
        # A peer that sends more is cut off, and connects anew.
        socket.maxmsgsize = self._limits.max_bytes
        socket.rcvhwm, socket.sndhwm = _MAX_RECEIVED, _MAX_REQUESTS
        if self._keys is not None:
            socket.curve_serverkey = self._keys.public
            socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        socket.connect(address)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _read(self, worker: str, frames: list[bytes]) -> Batch | Snapshot | None:
        dropped = self.stats.dropped
        if len(frames) != 2 or len(frames[0]) != 8:
            dropped[Dropped.MALFORMED] += 1
            return None
        try:
            message = self._decoder.decode(frames[1], worker, int.from_bytes(frames[0], "big", signed=True))
        except Malformed:
            dropped[Dropped.MALFORMED] += 1
            return None
        if message.worker != worker:
            dropped[Dropped.UNKNOWN_WORKER] += 1
            return None
        self.stats.num_messages += 1
        return message


def _received(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    for _ in range(_MAX_AT_ONCE):
        try:
            yield socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return


class EventFeed:
    """Feeds a fleet with its workers' events. Owned by the event loop that calls `start`."""

    def __init__(self, fleet: Callable[[], Fleet], keys: Keys | None = None) -> None:
        """Feeds the fleet that `fleet` returns at the time."""
        self.subscriber = Subscriber(keys)
        self._fleet = fleet
        self._calls: deque[Callable[[], None]] = deque()
        self._names: dict[str, str] = {}
        """A worker's name in its events -> its name in the fleet."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="marconi-router-events", daemon=True)
        self._loop: asyncio.AbstractEventLoop
        """The loop that `start` was called on."""
        self._is_working = False
        self._turned_s = 0.0
        """When the thread last took a turn."""
        self._why_unheard = self._why_unapplied = ""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Feed the fleet on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._turned_s = time.monotonic()
        self._thread.start()
        self._request_again()

    def close(self) -> None:
        """Close the sockets."""
        if self._timer is not None:
            self._timer.cancel()
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def why_not_fed(self) -> str:
        """Why the index does not follow its workers now, in words; empty while it does."""
        if why := self._why_unheard or self._why_unapplied:
            return why
        if not self._thread.is_alive():
            return "the thread that reads workers' events has ended"
        silent_s = time.monotonic() - self._turned_s
        return f"workers' events were last read {silent_s:.0f} s ago" if silent_s > _SILENT_S else ""

    def subscribe(self, name: str, sockets: WorkerSockets) -> None:
        """Subscribe to the worker that the fleet knows as `name`; `ValueError` if another publishes by its name."""
        other = self._names.get(sockets.worker)
        if other is not None:
            raise ValueError(f"{name}: publishes its events as {sockets.worker!r}, and so does {other}")
        self._names[sockets.worker] = name
        self._calls.append(lambda: self.subscriber.add(sockets))

    def unsubscribe(self, worker: str) -> None:
        """Unsubscribe from the worker that publishes as `worker`, if there is a subscription."""
        if self._names.pop(worker, None) is not None:
            self._calls.append(lambda: self.subscriber.remove(worker))

    # The thread

    def _poll(self) -> None:
        retry_s = _RETRY_S
        try:
            while not self._closing.is_set():
                try:
                    if self._why_unheard:
                        self.subscriber.reconnect()
                    self._turn()
                    self._why_unheard, retry_s = "", _RETRY_S
                except Exception as error:
                    if self._loop.is_closed():
                        return
                    if not self._why_unheard:
                        logger.exception("marconi: workers' events cannot be read; subscribing anew")
                    self._why_unheard = f"workers' events cannot be read ({type(error).__name__})"
                    self._closing.wait(retry_s)
                    self._turned_s, retry_s = time.monotonic(), min(2 * retry_s, _MAX_RETRY_S)
        finally:
            self.subscriber.close()

    def _turn(self) -> None:
        self._turned_s = time.monotonic()
        while self._calls:
            try:
                self._calls.popleft()()
            except (ValueError, KeyError, zmq.ZMQError):
                # Addresses were checked before; what is left must not end everybody's events.
                logger.exception("marconi: cannot subscribe to a worker's events")
        if messages := self.subscriber.poll(_POLL_S):
            self._loop.call_soon_threadsafe(self._receive, messages)

    # The loop

    def _receive(self, messages: Sequence[Message]) -> None:
        fleet, now_s = self._fleet(), time.monotonic()
        try:
            for message in messages:
                name = self._names.get(message.worker)
                # The fleet counts what still arrives from a worker that was unsubscribed from.
                fleet.receive(replace(message, worker=name or message.worker), now_s)
            self._request()
        except Exception as error:
            self._begin_again(fleet, error)
        if not self._is_working:
            self._work()

    def _work(self) -> None:
        fleet = self._fleet()
        try:
            self._is_working = fleet.work()
        except Exception as error:
            self._is_working = False
            self._begin_again(fleet, error)
        if self._is_working:
            self._loop.call_soon(self._work)
        elif self._why_unapplied:
            known = [fleet.sync(name).state for name in self._names.values() if name in fleet.index.workers]
            self._why_unapplied = self._why_unapplied if State.UNKNOWN in known else ""

    def _begin_again(self, fleet: Fleet, error: Exception) -> None:
        """Forget what all workers hold, which may be half of it: snapshots are requested, and tell all."""
        if not self._why_unapplied:
            logger.error("marconi: workers' events cannot be applied; all is read anew", exc_info=error)
        self._why_unapplied = f"workers' events cannot be applied ({type(error).__name__})"
        for worker in list(fleet.index.workers):
            fleet.remove_worker(worker)
            fleet.add_worker(worker)

    def _request(self) -> None:
        published_as = {name: worker for worker, name in self._names.items()}
        for name, first_batch in self._fleet().requests(time.monotonic()):
            if name in published_as:
                self._calls.append(partial(self._request_of, published_as[name], first_batch))

    def _request_of(self, worker: str, first_batch: int | None) -> None:
        if worker in self.subscriber.workers:
            self.subscriber.request(worker, first_batch)

    def _request_again(self) -> None:
        try:
            self._request()
        except Exception as error:
            self._begin_again(self._fleet(), error)
        self._timer = self._loop.call_later(_REQUEST_S, self._request_again)
