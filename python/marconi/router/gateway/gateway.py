"""The gateway's state, and every change of it: workers that come and go, requests that are sent to them.

    health check  --joins-->              workers, and what the `RouterCore` knows of each of their ranks
    request       --admit, dispatch-->    a rank that is not full and has room for the prompt, of a worker that is up

Workers of one gateway are alike: one model, hashes of the same blocks, one tokenizer. Prompts that this router's
tokenizer handles as theirs does, texts or chats, are tokenized here; for others a worker's tokenizer is used.

To the dispatcher each data-parallel rank is a worker of its own, by the name of its `Rank`. A request whose client asks
for a rank is given to that rank of any worker, or to a worker whose ranks are not known.

Owner: the event loop.
"""

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from marconi.events.address import Keys
from marconi.model.learned_latency import LearnedLatency
from marconi.router.core import RoutedRequest, RouterCore
from marconi.router.description import Description, EventSource
from marconi.router.dispatch import Prompt, Ticket
from marconi.router.gateway.added import RANK
from marconi.router.gateway.errors import HttpRefusal
from marconi.router.gateway.placed import Placed
from marconi.router.gateway.settings import Settings
from marconi.router.gateway.worker import Condition, Health, Rank, Tokenization, Worker
from marconi.router.prompts import PromptKind, PromptReader

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
        keeps_ids = settings.record is not None
        super().__init__(reader, latency, routing, keys, settings.snapshot_period_s, keeps_ids=keeps_ids)
        self.settings = settings
        self.workers: dict[str, Worker] = {}
        self.ranks: dict[str, Rank] = {}
        """The ranks of all workers that were described, by name: the dispatcher chooses among them."""
        self.placed: dict[str, Placed] = {}
        """The latest requests of each of them."""
        self.kinds = frozenset(PromptKind)
        """Prompts that are tokenized here."""

    # Workers

    def add(self, url: str) -> Worker:
        """Add a worker that is not described yet; `ValueError` for one that is known."""
        if url in self.workers:
            raise ValueError(f"a worker must be new to this router, got {url} again")
        worker = self.workers[url] = Worker(url, Health(self.settings.health))
        return worker

    def join(self, worker: Worker, description: Description, tokenization: Tokenization) -> None:
        """Route to a worker as it is described now; `ValueError`, one line, where it is unlike the others."""
        self._require_alike(worker, description, tokenization)
        before = worker.description
        ranks = {rank.name: rank for rank in (Rank(worker, number) for number in description.ranks)}
        if description.events != (before.events if before is not None else None):
            # Where subscribing fails, the next description counts as another one, too.
            worker.description = None
            for source in () if before is None else before.events:
                self.feed.unsubscribe(source.sockets.worker)
            self._subscribe(list(ranks), description.events)
        worker.description, worker.tokenization = description, tokenization
        self.kinds = tokenization.kinds
        self.reader = self.reader.for_workers(tokenization.kinds, description.model)
        if self.remote is not None:
            self.remote.forget()
        if tokenization.difference:
            # Many templates take no parts, which SGLang joins: nothing to mend.
            level = logging.INFO if PromptKind.CHATS in tokenization.kinds else logging.WARNING
            logger.log(level, "marconi: %s; workers tokenize what is not alike", tokenization.difference)
        self._remove_ranks(worker, kept=ranks)
        for name in ranks:
            if name not in self.ranks:
                self.dispatcher.add_worker(name)
                self.placed[name] = Placed()
        self.ranks |= ranks

    def remove(self, url: str) -> Worker:
        """Stop routing to a worker; its answers under way are still relayed. `KeyError` if it is not known."""
        worker = self.workers.pop(url)
        for source in () if worker.description is None else worker.description.events:
            self.feed.unsubscribe(source.sockets.worker)
        self._remove_ranks(worker)
        return worker

    def up(self) -> list[Worker]:
        """The workers that take requests."""
        return [worker for worker in self.workers.values() if worker.is_up]

    def num_running(self, worker: Worker) -> int:
        """Requests of all ranks of a worker that have not ended."""
        return sum(self.dispatcher.num_running(rank.name) for rank in worker.ranks if rank.name in self.ranks)

    def _subscribe(self, names: Sequence[str], events: Sequence[EventSource]) -> None:
        """Subscribe to all ranks of a worker, or none: `ValueError` where another publishes by the name of one."""
        subscribed: list[str] = []
        try:
            for name, source in zip(names, events, strict=False):
                self.feed.subscribe(name, source.sockets)
                subscribed.append(source.sockets.worker)
        except ValueError:
            for published_as in subscribed:
                self.feed.unsubscribe(published_as)
            raise
        if events:
            self.set_hashes(events[0].model, events[0].block_tokens)

    def _remove_ranks(self, worker: Worker, kept: Collection[str] = ()) -> None:
        for name in [name for name, rank in self.ranks.items() if rank.worker is worker and name not in kept]:
            self.dispatcher.remove_worker(name)
            del self.ranks[name], self.placed[name]

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
            if not (known.events and description.events):
                continue
            for what in ("block_tokens", "model"):
                own, others = getattr(description.events[0], what), getattr(known.events[0], what)
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
            raise HttpRefusal(400, f"the prompt must have at most {limit} tokens, got {num_tokens}")
        room = max((self._room(rank) for rank in self._up()), default=math.inf)
        if request.is_known and num_tokens > room:
            raise HttpRefusal(400, f"the prompt must fit the workers' context, {room:.0f} tokens, got {num_tokens}")
        return request

    def dispatch_to_free(self, prompt: Prompt, tried: Collection[str], wanted: object = None) -> Ticket | None:
        """Dispatch a request to a rank with room, of a worker that is up and, if possible, not in `tried`.

        Returns None if no rank has room. The prompt must fit the rank's context where its tokens are known. With
        `wanted`, only ranks of that number qualify, of any worker; raises a 400 if no worker has it.
        """
        limit = self.settings.max_requests_per_worker
        free = [rank for rank in self._up(wanted) if self.dispatcher.num_running(rank.name) < limit]
        if prompt.chain.hashes:
            free = [rank for rank in free if prompt.num_tokens <= self._room(rank)]
        among = [rank.name for rank in free if rank.worker.url not in tried] or [rank.name for rank in free]
        return self.dispatch(prompt, among) if among else None

    def idlest(self) -> Worker | None:
        """The worker that is up with the fewest requests."""
        return min(self.up(), key=self.num_running, default=None)

    def soonest_free_s(self) -> float:
        """Seconds until the rank with the least work ahead has done it; 0 without workers."""
        now_s = time.monotonic()
        return min((self.dispatcher.work_ahead_s(rank.name, now_s) for rank in self._up()), default=0.0)

    def _up(self, wanted: object = None) -> list[Rank]:
        """The ranks of the workers that are up, of those that a client's wish leaves; a 400 where it leaves none."""
        ranks = list(self.ranks.values())
        if wanted is not None and ranks:
            # A worker whose ranks are not known gets the wish unchanged.
            left = [rank for rank in ranks if rank.number == wanted] or [rank for rank in ranks if rank.number is None]
            if not left:
                highest = max(rank.number for rank in ranks if rank.number is not None)
                got = str(wanted)[:20] if isinstance(wanted, int) else f"a {type(wanted).__name__}"
                raise HttpRefusal(400, f"{RANK} must be a data-parallel rank of a worker, 0 to {highest}, got {got}")
            ranks = left
        return [rank for rank in ranks if rank.worker.is_up]

    def _room(self, rank: Rank) -> float:
        """Tokens of the longest prompt that a rank takes."""
        events = rank.events
        if events is None or events.max_context_tokens is None:
            return math.inf
        return events.max_context_tokens - 1
