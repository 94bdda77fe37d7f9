"""The publisher of a worker: the events of its cache, in numbered batches to all subscribers.

    source --drain--> batches of at most `max_events`, every `period_s`, or as soon as so many wait
              PUB      topic, sequence (8 bytes, big-endian), payload          to all
              ROUTER   a request with a sequence number gets the batches from it on that are still there, then -1;
                       a request with `SNAPSHOT` gets everything that the worker holds now

The two sockets and the first kind of request are SGLang's (`ZmqEventPublisher`). A snapshot is sent to the peer that
requested it, never to all: an old consumer would take it for new events, and one that is not read is never made.
Nothing here waits for a peer: a message that it does not take is dropped.

The worker's load is sent with the next batch, or with an empty one, where requests came or ended; else every
`LOAD_PERIOD_S` while it is busy, and no more once it is idle. Its age is sent with it, so that a router knows by its
own clock which of its requests it counts.

An epoch is the time at which the publisher was made, in nanoseconds, so a worker that starts again has a later one.

Owner: a thread of its own, which alone touches the source and the sockets, and works in short slices (`paced`) with a
rest after each. A thread that runs Python lets another in only every `sys.getswitchinterval` (5 ms), and that is how
long a scheduler would wait each time it comes back from the device. A sleep lets it in at once; one of no length does
not, since the interpreter's lock is taken again before the other has woken up.
"""

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Final, Protocol, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator

from marconi.events.address import Keys, require_private
from marconi.events.base import LOAD_PERIOD_S, Event, WorkerLoad
from marconi.events.codec import FULL_ATTENTION, Encoder, Published

logger = logging.getLogger(__name__)

SNAPSHOT: Final = b"marconi-snapshot"
"""The frame that requests a snapshot, and the topic of the answer."""
END: Final = (-1).to_bytes(8, "big", signed=True)
"""The sequence after the last batch of a replay."""
_POLLS_PER_PERIOD: Final = 5
_MAX_POLL_MS: Final = 20
_MAX_REQUEST_BYTES: Final = 4_096
"""The longest frame from a peer; the handshake of CURVE takes some hundreds."""
WORK_S: Final = 0.0005
REST_S: Final = 0.0005

T = TypeVar("T")


def paced(items: Iterable[T]) -> Iterator[T]:
    """Yield `items`, resting after each slice of work that makes and uses them."""
    began_s = time.perf_counter()
    for item in items:
        yield item
        if time.perf_counter() - began_s >= WORK_S:
            time.sleep(REST_S)
            began_s = time.perf_counter()


class RecordSource(Protocol):
    """The events of a worker's cache, and everything it holds after them; only the publisher's thread calls it."""

    @property
    def num_waiting(self) -> int:
        """About how many changes wait for `drain`."""
        ...

    def drain(self) -> Iterable[Published]:
        """Yield the events since the last call, in order."""
        ...

    def held(self) -> Iterable[Event]:
        """Yield everything held after the events so far, as `KvStored` and `StateStored`."""
        ...

    def close(self) -> None:
        """End; called last."""
        ...


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """The addresses of one worker's publisher, its name, and its limits."""

    worker: str
    events: str
    """The address that the PUB socket binds."""
    replay: str
    """The address that the ROUTER socket binds."""
    block_tokens: int
    dp_rank: int | None = None
    kv_kind: str = FULL_ATTENTION
    """vLLM's kind of the KV."""
    topic: bytes = b""
    keys: Keys | None = field(default=None, repr=False)
    period_s: float = 0.1
    max_events: int = 512
    """The most events of one batch."""
    max_replay_batches: int = 10_000
    max_replay_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        """Raise `ValueError` for an address that others can reach without keys."""
        for address in (self.events, self.replay):
            require_private(address, self.keys)


class Publisher:
    """Publishes until it is closed. An error of the source ends it with a line in the log, rather than wrong events."""

    def __init__(self, source: RecordSource, options: PublisherOptions, epoch: int | None = None) -> None:
        """Bind the sockets and start; `ValueError` for an address that cannot be bound."""
        self.epoch = time.time_ns() if epoch is None else epoch
        self.options = options
        self.sequence = -1
        """The number of the last batch that was sent."""
        self.num_events = 0
        """Number of all events that were sent."""
        self._source = source
        self._encoder = Encoder(options.block_tokens, options.dp_rank, options.kv_kind)
        self._sent: deque[tuple[int, bytes]] = deque()
        self._num_sent_bytes = 0
        self._snapshot: tuple[int, bytes] | None = None
        self._num_snapshots = 0
        self._flushed_s = time.monotonic()
        self._load: tuple[WorkerLoad, float] | None = None
        """The last, and when it was so."""
        self._sent_load: WorkerLoad | None = None
        self._load_sent_s = 0.0
        self._closing = threading.Event()
        self._context = zmq.Context()
        self._authenticator: Any = None
        try:
            self._guard()
            self._pub = self._bind(zmq.PUB, options.events, 100_000)
            # Room for a whole replay: beyond it a ROUTER drops.
            self._router = self._bind(zmq.ROUTER, options.replay, options.max_replay_batches + 16)
        except ValueError:
            self._release()
            raise
        self._thread = threading.Thread(target=self._run, name="marconi-events", daemon=True)
        self._thread.start()
        # A context that is collected while its sockets are open waits for them.
        atexit.register(self.close)

    def close(self) -> None:
        """Publish the changes that wait, and stop."""
        atexit.unregister(self.close)
        self._closing.set()
        self._thread.join()

    def publish_load(self, load: WorkerLoad) -> None:
        """Publish the worker's load as it is now, soon and unless another follows; from any thread, and cheap."""
        self._load = load, time.monotonic()

    @property
    def is_publishing(self) -> bool:
        """True if its thread is running."""
        return self._thread.is_alive()

    # Sockets

    def _guard(self) -> None:
        """Admit peers that have the fleet's keys, and no others."""
        if (keys := self.options.keys) is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            fleet_only = SimpleNamespace(callback=lambda _domain, key: key == keys.public)
            self._authenticator.configure_curve_callback(credentials_provider=fleet_only)

    def _bind(self, kind: int, address: str, high_water_mark: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.set_hwm(high_water_mark)
        socket.linger = 0
        socket.maxmsgsize = _MAX_REQUEST_BYTES
        socket.ipv6 = "[" in address
        if self.options.keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self.options.keys.public, self.options.keys.secret
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ValueError(f"{address}: {zmq.strerror(error.errno or 0)}") from None
        return socket

    def _release(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    # The thread

    def _run(self) -> None:
        poll_ms = min(max(int(self.options.period_s * 1000 / _POLLS_PER_PERIOD), 1), _MAX_POLL_MS)
        try:
            while not self._closing.is_set():
                if self._router.poll(poll_ms):
                    self._answer(self._router.recv_multipart())
                waited_s = time.monotonic() - self._flushed_s
                if waited_s >= self.options.period_s or self._source.num_waiting >= self.options.max_events:
                    self._flush()
            self._flush()
        except Exception:
            logger.exception("marconi: events of %s end here", self.options.worker)
        finally:
            self._source.close()
            self._release()

    def _flush(self) -> None:
        self._flushed_s = time.monotonic()
        batch: list[Published] = []
        for published in paced(self._source.drain()):
            batch.append(published)
            if len(batch) == self.options.max_events:
                self._send(batch)
                batch = []
        load = self._due_load(self._flushed_s)
        if batch or load is not None:
            self._send(batch, load)

    def _due_load(self, now_s: float) -> WorkerLoad | None:
        """The load to send now; it counts as sent."""
        if self._load is None:
            return None
        (load, was_s), sent = self._load, self._sent_load
        if sent is not None and replace(load, memory=sent.memory) == sent:
            is_idle = load == sent and load.num_running + load.num_waiting == 0
            if is_idle or now_s - self._load_sent_s < LOAD_PERIOD_S:
                return None
        self._sent_load, self._load_sent_s = load, now_s
        return replace(load, age_s=max(time.monotonic() - was_s, 0.0))

    def _send(self, batch: list[Published], load: WorkerLoad | None = None) -> None:
        payload = self._encoder.batch(self.options.worker, self.epoch, batch, time.time(), load)
        self.sequence += 1
        self.num_events += len(batch)
        self._pub.send_multipart((self.options.topic, self.sequence.to_bytes(8, "big"), payload))
        self._remember(payload)

    def _remember(self, payload: bytes) -> None:
        self._sent.append((self.sequence, payload))
        self._num_sent_bytes += len(payload)
        while len(self._sent) > self.options.max_replay_batches or self._num_sent_bytes > self.options.max_replay_bytes:
            self._num_sent_bytes -= len(self._sent.popleft()[1])

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or frames[1]:
            return
        peer, _, request = frames
        if request == SNAPSHOT:
            self._flush()
            sequence = self.sequence.to_bytes(8, "big", signed=True)
            # Not copied: a big worker's has megabytes.
            self._router.send_multipart((peer, b"", SNAPSHOT, sequence, self._held()), copy=False)
        elif len(request) == 8:
            first = int.from_bytes(request, "big")
            for sequence_sent, payload in self._sent:
                if sequence_sent >= first:
                    number = sequence_sent.to_bytes(8, "big")
                    self._router.send_multipart((peer, b"", self.options.topic, number, payload))
            self._router.send_multipart((peer, b"", b"", END, b""))

    def _held(self) -> bytes:
        """The payload of a snapshot: the last one if nothing was published since."""
        if self._snapshot is None or self._snapshot[0] != self.sequence:
            events, number = paced(self._source.held()), self._num_snapshots
            payload = self._encoder.snapshot(self.options.worker, self.epoch, number, events, time.time())
            self._num_snapshots += 1
            self._snapshot = (self.sequence, payload)
        return self._snapshot[1]
