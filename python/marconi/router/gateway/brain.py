"""What the gateway knows, and every change of it: workers that come and go, requests that go to them.

    watcher  --joins, removes-->  members, and what the `Core` knows of them
    request  --admit, dispatch-->  a worker that is up, not full, and has room for the prompt

Workers of one router are alike: one model, hashes of the same blocks, one tokenizer. Where that is this router's, it
tokenizes itself; where it is not, for texts or for chats, workers are asked.

Owner: the event loop.
"""

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from marconi.events.address import Keys
from marconi.model.learned_latency import LearnedLatency
from marconi.router.core import Core, RoutedRequest
from marconi.router.dispatch import Prompt, Ticket
from marconi.router.gateway.answers import refusal
from marconi.router.gateway.member import Member, Tokens
from marconi.router.gateway.settings import Settings
from marconi.router.prompts.base import Kind, PromptReader
from marconi.router.workers.description import Description
from marconi.router.workers.health import Condition, Health

logger = logging.getLogger(__name__)


class Brain(Core):
    """One gateway's; see the module."""

    def __init__(
        self,
        reader: PromptReader,
        latency: LearnedLatency,
        settings: Settings,
        routing: str = "state-aware",
        keys: Keys | None = None,
    ) -> None:
        """`ValueError` for a routing that is unknown."""
        super().__init__(reader, latency, routing, keys, settings.snapshot_period_s)
        self.settings = settings
        self.members: dict[str, Member] = {}
        self.kinds = frozenset(Kind)
        """Prompts that are tokenized here."""

    # Workers

    def add(self, url: str) -> Member:
        """A worker that has still to be asked what it is; `ValueError` for one that is known."""
        if url in self.members:
            raise ValueError(f"{url}: is a worker of this router already")
        member = self.members[url] = Member(url, Health(self.settings.patience))
        return member

    def joins(self, member: Member, described: Description, tokens: Tokens) -> None:
        """A worker said what it is, anew or for the first time; `ValueError`, one line, where it does not fit."""
        self._require_alike(member, described, tokens)
        before = member.description
        if described.events != (before.events if before is not None else None):
            # Where it cannot be followed, this is another worker the next time, too.
            member.description = None
            if before is not None and before.events is not None:
                self.feed.leave(before.events.sockets.worker)
            if described.events is not None:
                self.feed.follow(member.url, described.events.sockets)
                self.agree_on(described.events.model, described.events.block_tokens)
        member.description, member.tokens = described, tokens
        self.kinds = tokens.kinds
        self.reader = self.reader.only(tokens.kinds)
        if self.remote is not None:
            self.remote.forget()
        if tokens.why:
            logger.warning("marconi: %s; workers tokenize what is not alike", tokens.why)
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

    def _require_alike(self, member: Member, described: Description, tokens: Tokens) -> None:
        for other in self.members.values():
            known = other.description
            # A refused one was described before it became another.
            if known is None or other is member or other.health.condition is Condition.REFUSED:
                continue
            if known.model != described.model:
                raise ValueError(
                    f"{member.url} serves {described.model!r}, {other.url} {known.model!r}; one model is right"
                )
            if (tokens.kinds, tokens.text_hash) != (other.tokens.kinds, other.tokens.text_hash):
                raise ValueError(
                    tokens.why or f"{member.url}: its tokenizer is not that of {other.url}, which is not this router's"
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

    # Requests

    async def admit(
        self, route: str, body: Mapping[str, Any], num_bytes: int, session: str | None = None
    ) -> RoutedRequest:
        """A body as it is routed; a 400 in one line for a prompt that is too long."""
        request = await self.read(route, body, num_bytes, session)
        num_tokens, limit = request.prompt.num_tokens, self.settings.max_prompt_tokens
        if request.is_known and num_tokens > limit:
            raise refusal(400, f"the prompt has {num_tokens} tokens; at most {limit} are right")
        room = max((self._room(member) for member in self.up()), default=math.inf)
        if request.is_known and num_tokens > room:
            raise refusal(400, f"the prompt has {num_tokens} tokens; the workers' context has room for {room:.0f}")
        return request

    def dispatch_to_free(self, prompt: Prompt, tried: Collection[str]) -> Ticket | None:
        """Give a request to a worker that is up and not full, if there is any; rather to one that was not tried.

        Where contexts differ, to one that the prompt fits in.
        """
        limit = self.settings.max_requests_per_worker
        free = [member.url for member in self.up() if self.dispatcher.num_running(member.url) < limit]
        if prompt.chain.hashes:
            free = [url for url in free if prompt.num_tokens <= self._room(self.members[url])]
        among = [url for url in free if url not in tried] or free
        return self.dispatch(prompt, among) if among else None

    def idlest(self) -> Member | None:
        """The worker that is up with the fewest requests."""
        return min(self.up(), key=lambda member: self.dispatcher.num_running(member.url), default=None)

    def soonest_free_s(self) -> float:
        """Until the worker that has least ahead of it has done that; 0 without workers."""
        return min((self.work_ahead_s(member.url) for member in self.up()), default=0.0)

    def _room(self, member: Member) -> float:
        """Tokens of the longest prompt that a worker takes."""
        events = None if member.description is None else member.description.events
        if events is None or events.max_context_tokens is None:
            return math.inf
        return events.max_context_tokens - 1
