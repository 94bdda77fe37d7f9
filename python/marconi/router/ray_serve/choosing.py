"""Which replica takes a request, for a host that keeps the replicas, counts what runs on them, and calls them itself.

    update     the host's replicas, and what each said of itself    -> workers of the dispatcher, events that are heard
    asked      a call                                               -> its prompt, or that nobody can know it
    choose     a request, among the replicas that may take it       -> the dispatcher's, or None: the host's own rule
    went       where the host has sent it, whoever chose that       -> on this replica's account
    answered, ended

None where the prompt's tokens are not known, and where nobody's events are heard: hits would be a guess. A replica that
was not heard for `SILENT_S`, three snapshots, is taken to hold nothing until it is heard again.

The brain is the router's own (`router.dispatch`, `router.sync`, `router.index`, `router.routing`); nothing here
knows Ray. Owner: the event loop that calls `start`. Long prompts are read on a thread, which touches the reader alone.
"""

import asyncio
import json
import logging
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from marconi.events.address import Keys
from marconi.events.hashes import HashSpace
from marconi.model.learned_latency import LearnedLatency
from marconi.router.dispatch import Dispatcher, Ticket
from marconi.router.index import FleetIndex
from marconi.router.prompts.asked import QUICK_BYTES, Asked, known, unknown
from marconi.router.prompts.base import PromptReader
from marconi.router.ray_serve.call import Call
from marconi.router.routing.names import routing_of
from marconi.router.sync import Fleet
from marconi.router.sync.feed import EventFeed
from marconi.router.workers.description import EventsOf, describe

logger = logging.getLogger(__name__)

SILENT_S: Final = 15.0
_BLOCK_TOKENS: Final = 64
"""Until a replica says what its own are."""


@dataclass(slots=True)
class _Request:
    """Under way."""

    asked: Asked
    ticket: Ticket | None = None
    over: asyncio.TimerHandle | None = None
    """Of an answer that comes whole: when its prefill is over, by the model."""


class Choosing:
    """One host's; see the module."""

    def __init__(
        self, reader: PromptReader, latency: LearnedLatency, routing: str = "state-aware", keys: Keys | None = None
    ) -> None:
        """`ValueError` for a routing that is unknown."""
        self.reader = reader
        self.keys = keys
        self.latency = latency
        self.dispatcher = Dispatcher(Fleet(FleetIndex(_BLOCK_TOKENS)), routing_of(routing, self.latency), self.latency)
        self.feed = EventFeed(keys)
        self._events: dict[str, EventsOf | None] = {}
        """Of every replica; None where it tells none."""
        self._heard: set[str] = set()
        """Replicas that are listened to."""
        self._agreed: tuple[str | None, int] | None = None
        """What block hashes are of: the model's name and the tokens of a block, the same for all that are heard."""
        self._requests: dict[str, _Request] = {}
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="marconi-prompts")

    def start(self) -> None:
        """Listen to replicas from now on, on the running loop."""
        self.feed.start(lambda: self.dispatcher.fleet)

    def close(self) -> None:
        """Listen no more."""
        self.feed.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Replicas

    def update(self, told: Mapping[str, Mapping[str, Any]]) -> None:
        """The replicas from now on, and what each said: `url`, `model_info`, `marconi`; nothing; or why `unheard`."""
        for name in [name for name in self._events if name not in told]:
            self._listen_no_more(name)
            del self._events[name]
            self.dispatcher.remove_worker(name)
        for name, said in told.items():
            if name not in self._events:
                self._events[name] = self._described(name, said)
                self.dispatcher.add_worker(name)
        self._agree()

    def hears(self, name: str, now_s: float) -> bool:
        """Whether what a replica holds is known, as of not long ago."""
        heard_s = self.dispatcher.fleet.received_s(name) if name in self._heard else None
        return heard_s is not None and now_s - heard_s < SILENT_S

    def _described(self, name: str, said: Mapping[str, Any]) -> EventsOf | None:
        events: EventsOf | None = None
        if not said:
            without = "it says nothing of its server"
        elif "unheard" in said:
            without = str(said["unheard"])
        else:
            try:
                described = describe(str(said.get("url")), said.get("model_info"), said.get("marconi"), self.keys)
            except ValueError as wrong:
                without = str(wrong)
            else:
                events, without = described.events, described.without
        if events is None:
            logger.warning("marconi: replica %s is routed to without its events: %s", name, without)
        return events

    def _agree(self) -> None:
        """Listen to all that hash alike; to others once none of those is left, as when a model is replaced."""
        telling = {name: events for name, events in self._events.items() if events is not None}
        spaces = {name: (events.model, events.block_tokens) for name, events in telling.items()}
        if self._agreed not in spaces.values():
            self._agreed = next(iter(spaces.values()), None)
            if self._agreed is not None and self._agreed[1] != self.dispatcher.fleet.index.block_tokens:
                self.dispatcher.follow(Fleet(FleetIndex(self._agreed[1])))
        for name, events in telling.items():
            if name in self._heard or spaces[name] != self._agreed:
                continue
            try:
                self.feed.follow(name, events.sockets)
            except ValueError as taken:
                logger.warning("marconi: replica %s is routed to without its events: %s", name, taken)
                continue
            self._heard.add(name)

    def _listen_no_more(self, name: str) -> None:
        events = self._events[name]
        if events is not None and name in self._heard:
            self.feed.leave(events.sockets.worker)
            self._heard.discard(name)

    def _forget_silent(self, now_s: float) -> None:
        fleet = self.dispatcher.fleet
        for name in self._heard:
            heard_s = fleet.received_s(name)
            if heard_s is not None and now_s - heard_s >= SILENT_S:
                logger.warning("marconi: nothing was heard of replica %s for %.0f s", name, now_s - heard_s)
                fleet.remove_worker(name)
                fleet.add_worker(name)

    # Requests

    async def asked(self, call: Call) -> Asked:
        """What a call asks for; a body that its server will refuse is one that nobody can know."""
        if len(call.body) <= QUICK_BYTES:
            return self._read(call)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._read, call)

    def choose(self, request: str, asked: Asked, among: Collection[str]) -> str | None:
        """The replica that should take a request, which is on its account from now on; None: the host's own rule.

        A request that was chosen for before is chosen for anew.
        """
        self._forget(request)
        now_s = time.monotonic()
        self._forget_silent(now_s)
        there = [name for name in among if name in self._events]
        entry = self._requests[request] = _Request(asked)
        if not asked.is_known or not any(self.hears(name, now_s) for name in there):
            return None
        self._dispatch(entry, there, now_s)
        assert entry.ticket is not None
        return entry.ticket.worker

    def went(self, request: str, name: str) -> None:
        """Where a request was sent; a second time does nothing."""
        entry = self._requests.get(request)
        if entry is None or name not in self._events:
            return
        now_s = time.monotonic()
        if entry.ticket is not None and entry.ticket.worker != name:
            self._end(entry, now_s)
        if entry.ticket is None:
            self._dispatch(entry, [name], now_s)
        if not entry.asked.is_stream and entry.over is None and entry.ticket is not None:
            after_s = entry.ticket.decision.worker.work_ahead_s + entry.ticket.prefill_s
            entry.over = asyncio.get_running_loop().call_later(after_s, self._is_over, entry)

    def why(self, request: str) -> str:
        """Why a request goes where it does; empty where it was the host that chose."""
        entry = self._requests.get(request)
        return "" if entry is None or entry.ticket is None else str(entry.ticket.decision.reason)

    def answered(self, request: str) -> None:
        """Its answer has begun."""
        entry = self._requests.get(request)
        if entry is None or entry.ticket is None:
            return
        ticket, now_s = entry.ticket, time.monotonic()
        self.dispatcher.answered(ticket, now_s)
        worker = ticket.decision.worker
        if entry.asked.is_stream and not worker.work_ahead_s and ticket.prompt.chain.hashes:
            cached = min(worker.num_hit_tokens, ticket.prompt.num_tokens - 1)
            self.latency.observe(cached, ticket.prompt.num_tokens, now_s - ticket.dispatched_s)

    def ended(self, request: str, name: str | None = None) -> None:
        """It has finished, failed or was given up: on the replica `name`, if told, and not if it has moved since."""
        entry = self._requests.get(request)
        if entry is not None and (name is None or entry.ticket is None or entry.ticket.worker == name):
            self._forget(request)

    @property
    def num_requests(self) -> int:
        """Under way."""
        return len(self._requests)

    def _forget(self, request: str) -> None:
        entry = self._requests.pop(request, None)
        if entry is not None:
            self._end(entry, time.monotonic())

    def _end(self, entry: _Request, now_s: float) -> None:
        if entry.over is not None:
            entry.over.cancel()
            entry.over = None
        if entry.ticket is not None:
            self.dispatcher.ended(entry.ticket, now_s)
            entry.ticket = None

    def _dispatch(self, entry: _Request, among: Collection[str], now_s: float) -> None:
        entry.ticket = self.dispatcher.dispatch(entry.asked.prompt, now_s, among)

    def _is_over(self, entry: _Request) -> None:
        if entry.ticket is not None:
            self.dispatcher.answered(entry.ticket, time.monotonic())

    def _read(self, call: Call) -> Asked:
        model, block_tokens = self._agreed or (None, _BLOCK_TOKENS)
        try:
            body = json.loads(call.body)
            if not isinstance(body, dict):
                return unknown(call.body, b"", False)
            reading = self.reader.read(call.path.partition("?")[0], body)
            if reading.ids is None:
                return unknown(call.body, b"", reading.is_stream)
            space = HashSpace.of(model, reading.extra_key, reading.cache_salt)
            return known(reading, space, block_tokens)
        except (ValueError, RecursionError):
            # Its server says what is wrong with it.
            return unknown(call.body, b"", False)
