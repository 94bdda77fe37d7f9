"""A worker that publishes what a test gives it, and a router that stays in sync with it."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from marconi.events.base import (
    MAX_HASH,
    Batch,
    Cleared,
    Event,
    KvRemoved,
    KvStored,
    Snapshot,
    StateRemoved,
    StateStored,
)
from marconi.events.codec import Published
from marconi.events.publisher import Publisher, PublisherOptions
from marconi.router.index import FleetIndex
from marconi.router.subscriber import Message, Subscriber, WorkerSockets
from marconi.router.sync import Fleet, State, SyncLimits

BLOCK_TOKENS = 64
WORKER = "127.0.0.1:30001"

hashes = st.integers(0, MAX_HASH)
runs = st.lists(hashes, min_size=1, max_size=4, unique=True).map(tuple)
namespaces = st.binary(max_size=32)
stored = st.builds(KvStored, runs, st.none() | hashes, namespaces, st.sampled_from([BLOCK_TOKENS, 1, 17]))
states = st.builds(StateStored, hashes, st.integers(1, 1 << 20), namespaces)
events = st.lists(
    st.one_of(stored, states, st.builds(KvRemoved, runs), st.builds(StateRemoved, hashes), st.just(Cleared())),
    max_size=20,
)


class Script:
    """A source of the events that it is given; it holds what it is said to."""

    def __init__(self) -> None:
        self.waiting: deque[Event] = deque()
        self.everything: tuple[Event, ...] = ()
        self.num_walks = 0
        self.is_closed = False

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def drain(self) -> Sequence[Published]:
        return [Published(self.waiting.popleft()) for _ in range(len(self.waiting))]

    def held(self) -> tuple[Event, ...]:
        self.num_walks += 1
        return self.everything

    def close(self) -> None:
        self.is_closed = True


class Lossy:
    """A socket that loses the batches that a test names."""

    def __init__(self, socket: Any, lost: set[int]) -> None:
        self._socket = socket
        self._lost = lost

    def send_multipart(self, frames: Sequence[bytes]) -> None:
        if int.from_bytes(frames[1], "big") not in self._lost:
            self._socket.send_multipart(frames)


def outlet(folder: Path, **fields: Any) -> PublisherOptions:
    """On sockets in `folder`, quick."""
    given: dict[str, Any] = {"worker": WORKER, "block_tokens": BLOCK_TOKENS, "period_s": 0.01} | fields
    return PublisherOptions(events=f"ipc://{folder}/e", replay=f"ipc://{folder}/r", **given)


def publish(source: Script, at: PublisherOptions, lost: set[int] | None = None, epoch: int | None = None) -> Publisher:
    """A publisher; batches in `lost` reach nobody at first."""
    publisher = Publisher(source, at, epoch)
    if lost is not None:
        publisher._pub = Lossy(publisher._pub, lost)  # type: ignore[assignment]
    return publisher


@dataclass
class Router:
    """A subscriber and the fleet that it feeds, in one thread; what is requested is sent."""

    subscriber: Subscriber = field(default_factory=Subscriber)
    limits: SyncLimits = field(default_factory=lambda: SyncLimits(snapshot_period_s=1e6))
    fleet: Fleet = field(init=False)

    def __post_init__(self) -> None:
        self.fleet = Fleet(FleetIndex(BLOCK_TOKENS), self.limits)

    def add(self, at: PublisherOptions) -> None:
        self.subscriber.add(WorkerSockets(at.worker, at.events, at.replay))
        self.fleet.add_worker(at.worker)
        self._request()

    def poll(self, timeout_s: float) -> list[Message]:
        """What came in."""
        messages = self.subscriber.poll(timeout_s)
        for message in messages:
            self.fleet.receive(message, time.monotonic())
        self.fleet.settle()
        self._request()
        return messages

    def receive(self, is_enough: Callable[[list[Message]], bool]) -> list[Message]:
        """Everything that comes until it is enough; fails after ten seconds."""
        deadline_s = time.monotonic() + 10
        messages: list[Message] = []
        while not is_enough(messages):
            assert time.monotonic() < deadline_s, f"not enough: {messages}"
            messages.extend(self.poll(0.02))
        return messages

    def connect(self, source: Script) -> None:
        """Wait until batches reach it, and all that was published is there."""
        self.receive(lambda _: self.fleet.sync(WORKER).state is not State.UNKNOWN)
        deadline_s = time.monotonic() + 10
        while not any(isinstance(message, Batch) for message in self.poll(0.02)):
            assert time.monotonic() < deadline_s, "no batch came"
            source.waiting.append(Cleared())
        self.receive(lambda _: not source.waiting and self.fleet.sync(WORKER).state is State.CURRENT)

    def held(self) -> set[int]:
        """Blocks, as the fleet knows them."""
        return set(self.fleet.index.holding(WORKER).kv)

    def close(self) -> None:
        self.subscriber.close()

    def _request(self) -> None:
        for request in self.fleet.requests(time.monotonic()):
            self.subscriber.request(*request)


def is_snapshot(messages: list[Message]) -> bool:
    return any(isinstance(message, Snapshot) for message in messages)
