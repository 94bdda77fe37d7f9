"""The gateway's state, and every change of it: workers that come and go, requests that go to them.

    health check  --joins-->              workers, and what the `RouterCore` knows of them
    request       --admit, dispatch-->    a worker that is up, not full, and has room for the prompt

Workers of one gateway are alike: one model, hashes of the same blocks, one tokenizer. Prompts that this router's
tokenizer handles as theirs does, texts or chats, are tokenized here; for others a worker's tokenizer is used.

Owner: the event loop.
"""

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

from marconi.events.address import Keys
from marconi.model.learned_latency import LearnedLatency
from marconi.router.core import RoutedRequest, RouterCore
from marconi.router.description import Description
from marconi.router.dispatch import Prompt, Ticket
from marconi.router.gateway.errors import refusal
from marconi.router.gateway.settings import Settings
from marconi.router.gateway.worker import Condition, Health, Tokenization, Worker
from marconi.router.prompts import Kind, PromptReader

logger = logging.getLogger(__name__)


class Gateway(RouterCore):
    """The workers, their limits, and the router's core."""

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
        self.workers: dict[str, Worker] = {}
        self.kinds = frozenset(Kind)
        """Prompts that are tokenized here."""

    # Workers

    def add(self, url: str) -> Worker:
        """Add a worker that is not described yet; `ValueError` for one that is known."""
        if url in self.workers:
            raise ValueError(f"{url}: is a worker of this router already")
        worker = self.workers[url] = Worker(url, Health(self.settings.health))
        return worker

    def join(self, worker: Worker, description: Description, tokenization: Tokenization) -> None:
        """Route to a worker as it is described now; `ValueError`, one line, where it is unlike the others."""
        self._require_alike(worker, description, tokenization)
        before = worker.description
        if description.events != (before.events if before is not None else None):
            # Where subscribing fails, the next description counts as another one, too.
            worker.description = None
            if before is not None and before.events is not None:
                self.feed.unsubscribe(before.events.sockets.worker)
            if description.events is not None:
                self.feed.subscribe(worker.url, description.events.sockets)
                self.set_hashes(description.events.model, description.events.block_tokens)
        worker.description, worker.tokenization = description, tokenization
        self.kinds = tokenization.kinds
        self.reader = self.reader.for_workers(tokenization.kinds, description.model)
        if self.remote is not None:
            self.remote.forget()
        if tokenization.difference:
            logger.warning("marconi: %s; workers tokenize what is not alike", tokenization.difference)
        if worker.url not in self.dispatcher.workers:
            self.dispatcher.add_worker(worker.url)

    def remove(self, url: str) -> Worker:
        """Stop routing to a worker; its answers under way are still relayed. `KeyError` if it is not known."""
        worker = self.workers.pop(url)
        if worker.description is not None and worker.description.events is not None:
            self.feed.unsubscribe(worker.description.events.sockets.worker)
        if url in self.dispatcher.workers:
            self.dispatcher.remove_worker(url)
        return worker

    def up(self) -> list[Worker]:
        """The workers that take requests."""
        return [worker for worker in self.workers.values() if worker.is_up]

    def _require_alike(self, worker: Worker, description: Description, tokenization: Tokenization) -> None:
        for other in self.workers.values():
            known = other.description
            # A refused one was described before it became another.
            if known is None or other is worker or other.health.condition is Condition.REFUSED:
                continue
            if known.model != description.model:
                raise ValueError(
                    f"{worker.url}: must serve {known.model!r}, as {other.url} does, got {description.model!r}"
                )
            alike = (other.tokenization.kinds, other.tokenization.text_hash)
            if (tokenization.kinds, tokenization.text_hash) != alike:
                raise ValueError(
                    tokenization.difference
                    or f"{worker.url}: its tokenizer is not that of {other.url}, which is not this router's"
                )
            if known.events is None or description.events is None:
                continue
            for what in ("block_tokens", "model"):
                own, others = getattr(description.events, what), getattr(known.events, what)
                if own != others:
                    raise ValueError(
                        f"{worker.url}: {what} of its events must be {others!r}, as that of {other.url}, got {own!r}"
                    )

    # Requests

    async def admit(
        self, route: str, body: Mapping[str, Any], num_bytes: int, session: str | None = None
    ) -> RoutedRequest:
        """Read a body into the request to route; a 400 in one line for a prompt that is too long."""
        request = await self.read(route, body, num_bytes, session)
        num_tokens, limit = request.prompt.num_tokens, self.settings.max_prompt_tokens
        if request.is_known and num_tokens > limit:
            raise refusal(400, f"the prompt must have at most {limit} tokens, got {num_tokens}")
        room = max((self._room(worker) for worker in self.up()), default=math.inf)
        if request.is_known and num_tokens > room:
            raise refusal(400, f"the prompt must fit the workers' context, {room:.0f} tokens, got {num_tokens}")
        return request

    def dispatch_to_free(self, prompt: Prompt, tried: Collection[str]) -> Ticket | None:
        """Give a request to a worker that is up and not full, if there is one; rather to one that was not tried.

        Where contexts differ, to one that the prompt fits in.
        """
        limit = self.settings.max_requests_per_worker
        free = [worker.url for worker in self.up() if self.dispatcher.num_running(worker.url) < limit]
        if prompt.chain.hashes:
            free = [url for url in free if prompt.num_tokens <= self._room(self.workers[url])]
        among = [url for url in free if url not in tried] or free
        return self.dispatch(prompt, among) if among else None

    def idlest(self) -> Worker | None:
        """The worker that is up with the fewest requests."""
        return min(self.up(), key=lambda worker: self.dispatcher.num_running(worker.url), default=None)

    def soonest_free_s(self) -> float:
        """Seconds until the worker with the least work ahead has done it; 0 without workers."""
        return min((self.work_ahead_s(worker.url) for worker in self.up()), default=0.0)

    def _room(self, worker: Worker) -> float:
        """Tokens of the longest prompt that a worker takes."""
        events = None if worker.description is None else worker.description.events
        if events is None or events.max_context_tokens is None:
            return math.inf
        return events.max_context_tokens - 1
