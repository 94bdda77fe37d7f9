"""What a router knows, and every change of it: workers that come and go, requests that go to them.

    watcher  --joins, leaves-->  members, dispatcher, feed
    request  --prompt_of, dispatch, answered, ended-->  dispatcher

Prefills are timed as streams begin, or else told from what whole answers took, and the times fitted to the model's
FLOPs (`model.LearnedLatency`): whatever the workers are, a data sheet is believed only until then. Only requests that
had nothing ahead of them are taken.

Owner: the event loop. Long prompts are read on a thread, which touches the reader alone.
"""

import asyncio
import json
import math
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import Any, Final

from marconi.events.address import Keys
from marconi.events.hashes import HashSpace
from marconi.model.learned_latency import LearnedLatency
from marconi.router.dispatch import Dispatcher, Prompt, Ticket
from marconi.router.gateway.answers import num_answered, refusal
from marconi.router.gateway.member import Member
from marconi.router.gateway.settings import Settings
from marconi.router.index import FleetIndex
from marconi.router.prompts.asked import QUICK_BYTES, Asked, known, unknown
from marconi.router.prompts.base import PromptReader
from marconi.router.routing.names import routing_of
from marconi.router.sync import Fleet, SyncLimits
from marconi.router.sync.feed import EventFeed
from marconi.router.workers.description import Description
from marconi.router.workers.health import Condition, Health

_BLOCK_TOKENS: Final = 64
"""Until a worker says what its own are."""


class Brain:
    """One router's; see the module."""

    def __init__(
        self,
        reader: PromptReader,
        latency: LearnedLatency,
        settings: Settings,
        routing: str = "state-aware",
        keys: Keys | None = None,
    ) -> None:
        """`ValueError` for a routing that is unknown."""
        self.settings = settings
        self.keys = keys
        self.reader = reader
        self.routing = routing
        self.latency = latency
        fleet = self._fleet(_BLOCK_TOKENS)
        self.dispatcher = Dispatcher(fleet, routing_of(routing, self.latency), self.latency)
        self.feed = EventFeed(keys)
        self.members: dict[str, Member] = {}
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="marconi-router-prompts")
        self._over: dict[Ticket, asyncio.TimerHandle] = {}
        """When prefills are over by the model, of answers that come whole."""
        self._model: str | None = None
        """What the workers' hashes are namespaced by."""

    def start(self) -> None:
        """Listen to workers from now on, on the running loop."""
        self.feed.start(lambda: self.dispatcher.fleet)

    def close(self) -> None:
        """Listen no more."""
        self.feed.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Workers

    def add(self, url: str) -> Member:
        """A worker that has still to be asked what it is; `ValueError` for one that is known."""
        if url in self.members:
            raise ValueError(f"{url}: is a worker of this router already")
        member = self.members[url] = Member(url, Health(self.settings.patience))
        return member

    def joins(self, member: Member, described: Description) -> None:
        """A worker said what it is, anew or for the first time; `ValueError`, one line, where it does not fit."""
        self._require_alike(member, described)
        before = member.description
        if described.events != (before.events if before is not None else None):
            # Where it cannot be followed, this is another worker the next time, too.
            member.description = None
            if before is not None and before.events is not None:
                self.feed.leave(before.events.sockets.worker)
            if described.events is not None:
                self.feed.follow(member.url, described.events.sockets)
                self._agree_on(described.events.block_tokens, described.events.model)
        member.description = described
        if member.url not in self.dispatcher.workers:
            self.dispatcher.add_worker(member.url)

    def remove(self, url: str) -> Member:
        """Route to a worker no more; what it still answers is relayed. `KeyError` if it is not known."""
        member = self.members.pop(url)
        if member.description is not None and member.description.events is not None:
            self.feed.leave(member.description.events.sockets.worker)
        if url in self.dispatcher.workers:
            self.dispatcher.remove_worker(url)
        return member

    def up(self) -> list[Member]:
        """Workers that take requests."""
        return [member for member in self.members.values() if member.is_up]

    def _require_alike(self, member: Member, described: Description) -> None:
        for other in self.members.values():
            known = other.description
            # A refused one was described before it became another.
            if known is None or other is member or other.health.condition is Condition.REFUSED:
                continue
            if known.model != described.model:
                raise ValueError(
                    f"{member.url} serves {described.model!r}, {other.url} {known.model!r}; one model is right"
                )
            if known.events is None or described.events is None:
                continue
            for what in ("block_tokens", "model"):
                own, others = getattr(described.events, what), getattr(known.events, what)
                if own != others:
                    raise ValueError(
                        f"{member.url} tells its events with {what} {own!r}, {other.url} with {others!r}; "
                        "workers that are started alike are right"
                    )

    def _fleet(self, block_tokens: int) -> Fleet:
        return Fleet(FleetIndex(block_tokens), SyncLimits(snapshot_period_s=self.settings.snapshot_period_s))

    def _agree_on(self, block_tokens: int, model: str | None) -> None:
        self._model = model
        if block_tokens != self.dispatcher.fleet.index.block_tokens:
            self.dispatcher.follow(self._fleet(block_tokens))

    # Requests

    async def asked(self, route: str, body: Mapping[str, Any], num_bytes: int, session: str | None) -> Asked:
        """What a body asks for; a 400 in one line where that cannot be."""
        try:
            if num_bytes <= QUICK_BYTES:
                asked = self._read(route, body, session)
            else:
                loop = asyncio.get_running_loop()
                asked = await loop.run_in_executor(self._threads, self._read, route, body, session)
        except ValueError as wrong:
            raise refusal(400, " ".join(str(wrong).split())) from None
        except RecursionError:
            raise refusal(400, "the body is nested too deeply") from None
        limit = self.settings.max_prompt_tokens
        if asked.is_known and asked.prompt.num_tokens > limit:
            raise refusal(400, f"the prompt has {asked.prompt.num_tokens} tokens; at most {limit} are right")
        room = max((self._room(member) for member in self.up()), default=math.inf)
        if asked.is_known and asked.prompt.num_tokens > room:
            raise refusal(
                400, f"the prompt has {asked.prompt.num_tokens} tokens; the workers' context has room for {room:.0f}"
            )
        return asked

    def dispatch(self, prompt: Prompt, tried: Collection[str]) -> Ticket | None:
        """Give a request to a worker that is up and not full, if there is any; rather to one that was not tried.

        Where contexts differ, to one that the prompt fits in.
        """
        limit = self.settings.max_requests_per_worker
        free = [member.url for member in self.up() if self.dispatcher.num_running(member.url) < limit]
        if prompt.chain.hashes:
            free = [url for url in free if prompt.num_tokens <= self._room(self.members[url])]
        among = [url for url in free if url not in tried] or free
        return self.dispatcher.dispatch(prompt, time.monotonic(), among) if among else None

    def answered(self, ticket: Ticket) -> None:
        """The first byte of a stream has come."""
        now_s = time.monotonic()
        self.dispatcher.answered(ticket, now_s)
        if self._tells_latency(ticket):
            self.latency.observe(_cached(ticket), ticket.prompt.num_tokens, now_s - ticket.dispatched_s)

    def answered_whole(self, ticket: Ticket, body: bytes) -> None:
        """Its answer has come whole."""
        took_s = time.monotonic() - ticket.dispatched_s
        if not self.latency.is_timed and self._tells_latency(ticket):
            num_passes = num_answered(body)
            if num_passes is not None:
                self.latency.observe_whole(_cached(ticket), ticket.prompt.num_tokens, num_passes, took_s)

    def answers_whole(self, ticket: Ticket) -> None:
        """Its answer will come whole: its prefill is over when the model says."""
        after_s = ticket.decision.worker.work_ahead_s + ticket.prefill_s
        self._over[ticket] = asyncio.get_running_loop().call_later(
            after_s, lambda: self.dispatcher.answered(ticket, time.monotonic())
        )

    def refused(self, ticket: Ticket) -> None:
        """Its worker has not served it: nothing of it is put down to the worker."""
        self.dispatcher.refused(ticket, time.monotonic())
        self.ended(ticket)

    def ended(self, ticket: Ticket) -> None:
        """It has finished, failed, or its client has gone."""
        self.dispatcher.ended(ticket, time.monotonic())
        over = self._over.pop(ticket, None)
        if over is not None:
            over.cancel()

    def soonest_free_s(self) -> float:
        """Until the worker that has least ahead of it has done that; 0 without workers."""
        now_s = time.monotonic()
        return min((self.dispatcher.work_ahead_s(member.url, now_s) for member in self.up()), default=0.0)

    def _room(self, member: Member) -> float:
        """Tokens of the longest prompt that a worker takes."""
        events = None if member.description is None else member.description.events
        if events is None or events.max_context_tokens is None:
            return math.inf
        return events.max_context_tokens - 1

    def _tells_latency(self, ticket: Ticket) -> bool:
        return not ticket.decision.worker.work_ahead_s and bool(ticket.prompt.chain.hashes)

    def _read(self, route: str, body: Mapping[str, Any], session: str | None) -> Asked:
        reading = self.reader.read(route, body)
        space = HashSpace.of(self._model, reading.extra_key, reading.cache_salt)
        key = None if session is None else blake2b(session.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        if reading.ids is not None:
            return known(reading, space, self.dispatcher.fleet.index.block_tokens, key)
        said = next((body[name] for name in ("messages", "prompt", "text") if name in body), body)
        return unknown(json.dumps(said).encode(), space.namespace, reading.is_stream, key)


def _cached(ticket: Ticket) -> int:
    return min(ticket.decision.worker.num_hit_tokens, ticket.prompt.num_tokens - 1)
