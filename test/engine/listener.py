"""A router in small: what it receives of one server, by events and by snapshots, and what it makes of prompts."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import zmq

from marconi.events.address import Keys, TcpAddress
from marconi.events.base import Batch, Event, Snapshot
from marconi.events.hashes import HashSpace
from marconi.router.index import Chain, FleetIndex
from marconi.router.subscriber import Subscriber, WorkerSockets
from marconi.router.sync import Fleet, State, SyncLimits

from .client import HTTP

WITHIN_S = 60.0


def told_by(url: str) -> dict[str, Any]:
    """What the server's one rank says of its events."""
    (rank,) = HTTP.get(f"{url}/marconi", timeout=60.0).json()["ranks"]
    events: dict[str, Any] = rank["events"]
    return events


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's tokens and names."""

    ids: tuple[int, ...]
    extra_key: str | None = None
    cache_salt: str | None = None

    def chain(self, model: str, block_tokens: int) -> Chain:
        """What a router looks up: all positions before the last token, which is always computed."""
        space = HashSpace.of(model, self.extra_key, self.cache_salt)
        ids = np.array(self.ids[:-1], "<i8")
        num_whole = len(ids) // block_tokens
        digests = space.digests(space.start, ids[: num_whole * block_tokens].tobytes(), block_tokens)

        def tail(depth: int) -> int | None:
            if depth > len(ids):
                return None
            whole = depth // block_tokens
            before = digests[whole - 1] if whole else space.start
            (digest,) = space.digests(before, ids[whole * block_tokens : depth].tobytes(), block_tokens)
            return space.hash(digest)

        return Chain(space.namespace, [space.hash(digest) for digest in digests], tail)

    def send(self, url: str, max_new_tokens: int = 4) -> int:
        """Have it answered; how many of its tokens came from the cache."""
        names = {"extra_key": self.extra_key, "cache_salt": self.cache_salt}
        response = HTTP.post(
            f"{url}/generate",
            json={
                "input_ids": list(self.ids),
                "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
                **{name: value for name, value in names.items() if value is not None},
            },
            timeout=120.0,
        )
        response.raise_for_status()
        num_cached: int = response.json()["meta_info"]["cached_tokens"]
        return num_cached


@dataclass(slots=True)
class Listener:
    """Follows one server; `takes` may leave events out, as a router that knows less."""

    url: str
    told: dict[str, Any]
    subscriber: Subscriber
    raw: "zmq.Socket[bytes]"
    takes: Callable[[Event], bool] = lambda _: True
    fleet: Fleet = field(init=False)
    sequence: int = -1
    """Of the last batch that it received, in order from the first snapshot on."""
    snapshots: list[Snapshot] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    """Of all batches, as any consumer gets them."""
    payload_sequence: int = -1
    """Of the last of them: they come by a socket of their own, later than the batches or before."""

    def __post_init__(self) -> None:
        self.fleet = Fleet(FleetIndex(self.told["block_tokens"]), SyncLimits(snapshot_period_s=1e6))
        self.fleet.add_worker(self.worker)
        self._listen(lambda: bool(self.snapshots))
        first = self.snapshots[0]
        self.sequence = max(self.sequence, first.sequence)
        self._receive(first)

    @property
    def worker(self) -> str:
        name: str = self.told["worker"]
        return name

    def hit_tokens(self, prompt: Prompt) -> int:
        """What the server would have of a prompt, by its events."""
        chain = prompt.chain(self.told["model"], self.told["block_tokens"])
        hit = self.fleet.hits(chain, 0.0).get(self.worker)
        return 0 if hit is None else hit.num_tokens

    def settle(self) -> Snapshot:
        """Receive all that the server has published by now; the snapshot that says the same."""
        num_before = len(self.snapshots)
        self.subscriber.request(self.worker, None)
        self._listen(lambda: len(self.snapshots) > num_before)
        now = self.snapshots[-1]
        self._listen(lambda: self.sequence >= now.sequence)
        assert self.fleet.sync(self.worker).state is State.CURRENT
        return now

    def settle_payloads(self, snapshot: Snapshot) -> None:
        """Receive the payloads up to the last batch that `snapshot` holds."""
        self._listen(lambda: self.payload_sequence >= snapshot.sequence)

    def held(self) -> tuple[set[int], set[int]]:
        """Blocks, and those with a state behind them, by the events alone."""
        holding = self.fleet.index.holding(self.worker)
        return set(holding.kv), set(holding.states)

    def held_by(self, snapshot: Snapshot) -> tuple[set[int], set[int]]:
        """The same, by a snapshot alone."""
        index = FleetIndex(self.told["block_tokens"])
        index.add_worker(self.worker)
        index.apply(self.worker, snapshot.events)
        holding = index.holding(self.worker)
        return set(holding.kv), set(holding.states)

    def _listen(self, is_enough: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + WITHIN_S
        while not is_enough():
            assert time.monotonic() < deadline_s, f"{self.worker} published nothing more after batch {self.sequence}"
            for request in self.fleet.requests(time.monotonic()):
                self.subscriber.request(*request)
            for message in self.subscriber.poll(0.02):
                if isinstance(message, Snapshot):
                    self.snapshots.append(message)
                elif isinstance(message, Batch):
                    self.sequence = max(self.sequence, message.sequence)
                    self._receive(message)
            while self.raw.poll(0):
                _, number, payload = self.raw.recv_multipart()
                self.payloads.append(payload)
                self.payload_sequence = int.from_bytes(number, "big")

    def _receive(self, message: Batch | Snapshot) -> None:
        events = tuple(filter(self.takes, message.events))
        self.fleet.receive(replace(message, events=events), time.monotonic())
        self.fleet.settle()


@contextmanager
def listener(url: str, takes: Callable[[Event], bool] = lambda _: True, keys: Keys | None = None) -> Iterator[Listener]:
    """One on the server at `url`, which it discovers as a router does."""
    told = told_by(url)
    host = urlsplit(url).hostname or ""
    events, replay = (str(TcpAddress.parse(told[name]).reached_at(host)) for name in ("events", "replay"))
    subscriber, context = Subscriber(keys), zmq.Context()
    raw = context.socket(zmq.SUB)
    if keys is not None:
        raw.curve_serverkey = raw.curve_publickey = keys.public
        raw.curve_secretkey = keys.secret
    try:
        raw.connect(events)
        raw.subscribe(b"")
        subscriber.add(WorkerSockets(told["worker"], events, replay))
        yield Listener(url, told, subscriber, raw, takes)
    finally:
        subscriber.close()
        context.destroy(linger=0)


def hold_against(listeners: Sequence[Listener], prompts: Sequence[Prompt]) -> list[list[tuple[int, int]]]:
    """Ask for each prompt once more: what each listener expected of it, and what the server had."""
    found: list[list[tuple[int, int]]] = [[] for _ in listeners]
    for prompt in prompts:
        for each in listeners:
            each.settle()
        expected = [each.hit_tokens(prompt) for each in listeners]
        num_cached = prompt.send(listeners[0].url)
        for pairs, num_tokens in zip(found, expected, strict=True):
            pairs.append((num_tokens, num_cached))
    return found
