"""A router's sockets: what its workers publish and answer, as it comes in, and requests to them.

    SUB       batches to all
    DEALER    requests: the batches of a replay and its end, or a snapshot

Each worker has sockets of its own, so whose payload it is shows where it came from; one that names another worker is
dropped and counted. What cannot be read is dropped and counted, and the socket stays. Messages are handed on late,
twice or out of order, as networks have it: repairs are `worker_sync.py`'s.

Owner: whoever calls `poll`, one thread.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

import zmq

from marconi.events.address import Keys, require_private
from marconi.events.base import Batch, ReplayEnd, Snapshot
from marconi.events.codec import Decoder, Limits, Malformed
from marconi.events.publisher import END, SNAPSHOT

Message: TypeAlias = Batch | Snapshot | ReplayEnd
_MAX_AT_ONCE: Final = 64
"""Messages of one socket before the others have their turn."""
_MAX_RECEIVED: Final = 100_000
"""Messages of one socket that wait to be polled; ZMQ drops more."""
_MAX_REQUESTS: Final = 4
"""Requests that wait for a worker that is away; more are dropped."""


class Dropped(StrEnum):
    """Why a message was not handed on."""

    MALFORMED = "malformed"
    UNKNOWN_WORKER = "unknown-worker"


@dataclass(frozen=True, slots=True)
class WorkerSockets:
    """The addresses at which a worker publishes, and the name that it has in its events."""

    worker: str
    events: str
    replay: str


@dataclass(slots=True)
class SubscriberStats:
    """Messages and requests since the subscriber was made."""

    num_messages: int = 0
    num_replay_requests: int = 0
    num_snapshot_requests: int = 0
    dropped: Counter[Dropped] = field(default_factory=Counter)


class _Sockets(NamedTuple):
    """The sockets to one worker."""

    events: "zmq.Socket[bytes]"
    requests: "zmq.Socket[bytes]"


class Subscriber:
    """Subscribes to workers that come and go."""

    def __init__(self, keys: Keys | None = None, limits: Limits = Limits()) -> None:  # noqa: B008 - frozen
        self.stats = SubscriberStats()
        self._keys = keys
        self._limits = limits
        self._decoder = Decoder(limits)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[str, _Sockets] = {}

    def add(self, sockets: WorkerSockets) -> None:
        """Subscribe to a worker; `ValueError` for an address that others reach, without keys, or a name twice."""
        if sockets.worker in self._sockets:
            raise ValueError(f"{sockets.worker}: there is a worker of this name already")
        for address in (sockets.events, sockets.replay):
            require_private(address, self._keys)
        events, requests = self._connect(zmq.SUB, sockets.events), self._connect(zmq.DEALER, sockets.replay)
        events.subscribe(b"")
        self._sockets[sockets.worker] = _Sockets(events, requests)

    def remove(self, worker: str) -> None:
        """Unsubscribe from a worker; `KeyError` for one that is not known."""
        for socket in self._sockets.pop(worker):
            self._poller.unregister(socket)
            socket.close(linger=0)

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)

    @property
    def workers(self) -> list[str]:
        """The names of those that it is subscribed to."""
        return list(self._sockets)

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
        """Take what has come in, after waiting `timeout_s` at most for anything."""
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
                    if answer is not None:
                        messages.append(answer)
        return messages

    def _connect(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.ipv6 = "[" in address
        # Beyond it the peer is cut off, and connects anew.
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
