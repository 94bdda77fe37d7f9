"""A router's side: the batches and snapshots of its workers, as they come in.

A worker has sockets of its own, so whose payload it is shows where it came from; one that names another worker is
dropped and counted. What cannot be read is dropped and counted, and the socket stays.

    a gap         sequence > last + 1: the batches between are asked for, once; where the worker has them no more, a
                  snapshot is
    a new epoch   a snapshot is asked for, unless its batch 0 is there
    every `snapshot_period_s`, and when a worker is added: a snapshot is asked for

What comes is handed on as it comes: late, twice or out of order, as networks have it. Putting it right is for who keeps
the index (`marconi.router.consistency`).

Owner: whoever calls `poll`, one thread.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

import zmq

from marconi.router.events.address import Keys, require_private
from marconi.router.events.base import Batch, Snapshot
from marconi.router.events.codec import Decoder, Limits, Malformed
from marconi.router.events.publisher import END, SNAPSHOT

Message: TypeAlias = Batch | Snapshot
Clock: TypeAlias = Callable[[], float]
"""Seconds that never go back."""
_MAX_AT_ONCE: Final = 64
"""Messages of one socket before the others have their turn."""


class Dropped(StrEnum):
    """Why something was not handed on."""

    MALFORMED = "malformed"
    UNKNOWN_WORKER = "unknown-worker"


@dataclass(frozen=True, slots=True)
class WorkerSockets:
    """Where a worker tells, and as whom."""

    worker: str
    events: str
    replay: str


@dataclass(slots=True)
class _Line:
    """To one worker."""

    sockets: WorkerSockets
    events: "zmq.Socket[bytes]"
    questions: "zmq.Socket[bytes]"
    asked_s: float
    """When a snapshot was last asked for."""
    epoch: int = -1
    first: int = -1
    """The first of the epoch that was seen."""
    sequence: int = -1
    """The highest of the epoch that was seen."""
    missing: tuple[int, int] | None = None
    """The first and the last batch of a gap that was asked for."""


@dataclass(slots=True)
class Counts:
    """What happened, since the subscriber was made."""

    num_messages: int = 0
    num_gaps: int = 0
    num_snapshots_asked: int = 0
    dropped: Counter[Dropped] = field(default_factory=Counter)


class Subscriber:
    """Listens to workers that come and go."""

    def __init__(
        self,
        keys: Keys | None = None,
        snapshot_period_s: float = 5.0,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        clock: Clock = time.monotonic,
    ) -> None:
        """`ValueError` for a period that is not above 0."""
        if not snapshot_period_s > 0:
            raise ValueError(f"snapshots every {snapshot_period_s} s; a number of seconds above 0 is right")
        self.counts = Counts()
        self._keys = keys
        self._period_s = snapshot_period_s
        self._limits = limits
        self._decoder = Decoder(limits)
        self._clock = clock
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._lines: dict[str, _Line] = {}

    def add(self, sockets: WorkerSockets) -> None:
        """Listen to a worker; `ValueError` for an address that others reach, without keys, or a name twice."""
        if sockets.worker in self._lines:
            raise ValueError(f"{sockets.worker}: there is a worker of this name already")
        for address in (sockets.events, sockets.replay):
            require_private(address, self._keys)
        events, questions = self._connect(zmq.SUB, sockets.events), self._connect(zmq.DEALER, sockets.replay)
        events.subscribe(b"")
        self._lines[sockets.worker] = line = _Line(sockets, events, questions, self._clock())
        self._ask_snapshot(line)

    def remove(self, worker: str) -> None:
        """Listen to a worker no more; `KeyError` for one that is not known."""
        line = self._lines.pop(worker)
        for socket in (line.events, line.questions):
            self._poller.unregister(socket)
            socket.close(linger=0)

    def close(self) -> None:
        """Listen to nobody."""
        self._context.destroy(linger=0)

    @property
    def workers(self) -> list[str]:
        """Those that it listens to."""
        return list(self._lines)

    def ask_snapshot(self, worker: str) -> None:
        """Ask for a snapshot now; `KeyError` for a worker that is not known."""
        self._ask_snapshot(self._lines[worker])

    def ask_again(self, worker: str, first: int) -> None:
        """Ask for the batches from `first` on again; a snapshot comes where the worker has them no more.

        `KeyError` for a worker that is not known, `ValueError` for a number that no batch has.
        """
        line = self._lines[worker]
        if not 0 <= first < 1 << 63:
            raise ValueError(f"batch {first}; a number from 0 on is right")
        last = max(first, line.sequence)
        if not self._ask(line, first.to_bytes(8, "big")):
            self._ask_snapshot(line)
        elif line.missing is None:
            line.missing = (first, last)
        else:
            line.missing = (min(first, line.missing[0]), max(last, line.missing[1]))

    def poll(self, timeout_s: float) -> list[Message]:
        """What has come in, after waiting `timeout_s` at most for anything; snapshots that are due are asked for."""
        now_s = self._clock()
        for line in self._lines.values():
            if now_s - line.asked_s >= self._period_s:
                self._ask_snapshot(line)
        if not self._lines:
            # ZMQ does not wait where there is no socket.
            time.sleep(max(timeout_s, 0.0))
            return []
        ready = dict(self._poller.poll(max(int(timeout_s * 1000), 0)))
        messages: list[Message] = []
        for line in self._lines.values():
            if line.events in ready:
                for frames in _waiting(line.events):
                    self._take(line, frames, messages)
            if line.questions in ready:
                for frames in _waiting(line.questions):
                    self._take_answer(line, frames, messages)
        return messages

    # Sockets

    def _connect(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.ipv6 = "[" in address
        # Beyond it the peer is cut off, and connects anew.
        socket.maxmsgsize = self._limits.max_bytes
        # To a worker that is away, questions do not pile up.
        socket.set_hwm(100_000)
        socket.immediate = kind == zmq.DEALER
        if self._keys is not None:
            socket.curve_serverkey = self._keys.public
            socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        socket.connect(address)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _ask(self, line: _Line, question: bytes) -> bool:
        try:
            line.questions.send_multipart((b"", question), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _ask_snapshot(self, line: _Line) -> None:
        # A worker that is away is asked again at the next poll.
        if self._ask(line, SNAPSHOT):
            line.asked_s = self._clock()
            self.counts.num_snapshots_asked += 1
        else:
            line.asked_s = self._clock() - self._period_s

    # What comes in

    def _take(self, line: _Line, frames: list[bytes], messages: list[Message]) -> None:
        """A batch to all."""
        message = self._read(line, frames[1:])
        if isinstance(message, Batch):
            self._follow(line, message)
            messages.append(message)
        elif message is not None:
            self.counts.dropped[Dropped.MALFORMED] += 1

    def _take_answer(self, line: _Line, frames: list[bytes], messages: list[Message]) -> None:
        """A snapshot, a batch that was asked for again, or the end of those."""
        # A snapshot before the first batch has that sequence, too.
        if frames[1:] == [b"", END, b""]:
            self._end_replay(line)
            return
        message = self._read(line, frames[2:])
        if message is None:
            return
        messages.append(message)
        if isinstance(message, Snapshot):
            self._settle(line, message)
        elif message.epoch == line.epoch and line.missing is not None and message.sequence == line.missing[0]:
            first, last = line.missing
            line.missing = (first + 1, last) if first < last else None

    def _read(self, line: _Line, frames: list[bytes]) -> Message | None:
        worker, dropped = line.sockets.worker, self.counts.dropped
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
        self.counts.num_messages += 1
        return message

    # What is missing

    def _follow(self, line: _Line, batch: Batch) -> None:
        """Ask for what is missing before `batch`."""
        if batch.epoch > line.epoch:
            is_whole = batch.sequence == 0
            line.epoch, line.missing = batch.epoch, None
            line.first, line.sequence = batch.sequence, batch.sequence
            if not is_whole:
                self._ask_snapshot(line)
        elif batch.epoch == line.epoch and batch.sequence > line.sequence:
            first, last = line.sequence + 1, batch.sequence - 1
            line.sequence = batch.sequence
            if first <= last:
                self.counts.num_gaps += 1
                if line.missing is None and self._ask(line, first.to_bytes(8, "big")):
                    line.missing = (first, last)
                else:
                    self._ask_snapshot(line)

    def _settle(self, line: _Line, snapshot: Snapshot) -> None:
        """Go on from `snapshot`; ask for another if batches between it and the first one seen were missed."""
        if snapshot.epoch > line.epoch:
            line.epoch, line.missing = snapshot.epoch, None
            line.first = line.sequence = snapshot.sequence
        elif snapshot.epoch == line.epoch:
            if snapshot.sequence + 1 < line.first:
                self._ask_snapshot(line)
            if snapshot.sequence > line.sequence:
                line.sequence = snapshot.sequence
            if line.missing is not None and line.missing[1] <= snapshot.sequence:
                line.missing = None

    def _end_replay(self, line: _Line) -> None:
        """What is missing still will not come."""
        if line.missing is not None:
            line.missing = None
            self._ask_snapshot(line)


def _waiting(socket: "zmq.Socket[bytes]") -> Iterator[list[bytes]]:
    for _ in range(_MAX_AT_ONCE):
        try:
            yield socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return
