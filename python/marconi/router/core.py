"""What every router does with a request, whoever relays it: the gateway and Ray Serve's request router share it.

    body --reader--> ids, or a question for a worker's tokenizer --> hashes of blocks: a `RoutedRequest`
    RoutedRequest --dispatch--> Ticket --first_token--> --ended | refused-->     what its worker has to do
    workers' events --EventFeed-->                                               what its workers hold

Prefills are timed as streams begin, or else told from what whole answers took, and the times fitted to the model's
FLOPs (`model.LearnedLatency`): whatever the workers are, a data sheet is believed only until then. Only requests that
had nothing ahead of them are taken. The prefill of an answer that comes whole is over when the model says.

A prompt whose ids nobody knows (images, a body that its worker will refuse) is placed by how it begins and weighed by
its length; it has a hit nowhere.

Owner: the event loop that calls `start`. Long prompts are read on a thread, which touches the reader alone.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, TypeVar

from marconi.events.address import Keys
from marconi.events.hashes import HashSpace
from marconi.model.learned_latency import LearnedLatency
from marconi.router.dispatch import Dispatcher, Prompt, Ticket
from marconi.router.dispatch.hashing import prompt_of
from marconi.router.index import FleetIndex
from marconi.router.index.base import Chain
from marconi.router.prompts.base import PromptReader, Reading
from marconi.router.prompts.remote import RemoteTokenizer
from marconi.router.routing.names import routing_of
from marconi.router.sync import Fleet, SyncLimits
from marconi.router.sync.feed import EventFeed

QUICK_BYTES: Final = 16 << 10
"""A body up to which handing it to a thread would take longer than reading it."""
_BLOCK_TOKENS: Final = 64
"""Until a worker says what its own are."""
_CHARACTERS_PER_TOKEN: Final = 4
_KEY_BYTES: Final = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as it is routed."""

    prompt: Prompt
    is_known: bool
    """Whether the prompt's tokens are; else its length is a guess."""
    is_stream: bool


class Core:
    """One router's; see the module."""

    def __init__(
        self,
        reader: PromptReader,
        latency: LearnedLatency,
        routing: str = "state-aware",
        keys: Keys | None = None,
        snapshot_period_s: float = 5.0,
    ) -> None:
        """`ValueError` for a routing that is unknown."""
        self.reader = reader
        self.keys = keys
        self.routing = routing
        self.latency = latency
        self._limits = SyncLimits(snapshot_period_s=snapshot_period_s)
        fleet = Fleet(FleetIndex(_BLOCK_TOKENS), self._limits)
        self.dispatcher = Dispatcher(fleet, routing_of(routing, self.latency), self.latency)
        self.feed = EventFeed(keys)
        self.remote: RemoteTokenizer | None = None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="marconi-router-prompts")
        self._over: dict[Ticket, asyncio.TimerHandle] = {}
        """When prefills are over by the model, of answers that come whole."""
        self._model: str | None = None
        """What the workers' hashes are namespaced by."""

    def start(self, tokenize: Callable[[bytes], Awaitable[bytes | None]] | None = None) -> None:
        """Listen to workers from now on, on the running loop; `tokenize` posts to a worker's `/v1/tokenize`."""
        self.remote = None if tokenize is None else RemoteTokenizer(tokenize, self.run)
        self.feed.start(lambda: self.dispatcher.fleet)

    def close(self) -> None:
        """Listen no more."""
        self.feed.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def agree_on(self, model: str | None, block_tokens: int) -> None:
        """Hash blocks of so many tokens of that model from now on, as the workers do."""
        self._model = model
        if block_tokens != self.dispatcher.fleet.index.block_tokens:
            self.dispatcher.follow(Fleet(FleetIndex(block_tokens), self._limits))

    # Prompts

    async def run(self, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function of so many bytes: at once, or where it keeps nobody waiting."""
        if num_bytes <= QUICK_BYTES:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def read(
        self, route: str, body: Mapping[str, Any], num_bytes: int, session: str | None = None
    ) -> RoutedRequest:
        """A body as it is routed; `session` is its client's name for what belongs together."""
        key = None if session is None else blake2b(session.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        reading, request = await self.run(num_bytes, self._read, route, body, key)
        if reading.question is not None and self.remote is not None:
            ids = await self.remote.ids(reading.question, num_bytes)
            if ids is not None:
                known = replace(reading, ids=ids)
                request = await self.run(num_bytes, self._routed, known, body, key)
        return request

    def _read(self, route: str, body: Mapping[str, Any], key: bytes | None) -> tuple[Reading, RoutedRequest]:
        reading = self.reader.read(route, body)
        return reading, self._routed(reading, body, key)

    def _routed(self, reading: Reading, body: Mapping[str, Any], key: bytes | None) -> RoutedRequest:
        space = HashSpace.of(self._model, reading.extra_key, reading.cache_salt)
        if reading.ids is not None:
            prompt = prompt_of(reading.ids, space, self.dispatcher.fleet.index.block_tokens, key)
            return RoutedRequest(prompt, True, reading.is_stream)
        try:
            content = json.dumps(
                next((body[name] for name in ("messages", "prompt", "text") if name in body), body)
            ).encode()
        except RecursionError:
            content = b""
        if key is None:
            key = blake2b(space.namespace + content[:_KEY_BYTES], digest_size=16).digest()
        num_tokens = max(len(content) // _CHARACTERS_PER_TOKEN, 1)
        return RoutedRequest(Prompt(Chain(space.namespace, ()), num_tokens, key), False, reading.is_stream)

    # Requests

    def work_ahead_s(self, worker: str) -> float:
        """Of a request that is dispatched to a worker now."""
        return self.dispatcher.work_ahead_s(worker, time.monotonic())

    def dispatch(self, prompt: Prompt, among: Collection[str]) -> Ticket:
        """Give a request to one of the workers `among`; `ValueError` where there is none."""
        return self.dispatcher.dispatch(prompt, time.monotonic(), among)

    def first_token(self, ticket: Ticket) -> None:
        """A stream has begun: its prefill is over, and timed."""
        now_s = time.monotonic()
        self.dispatcher.answered(ticket, now_s)
        if _is_timed(ticket):
            self.latency.observe(_num_cached(ticket), ticket.prompt.num_tokens, now_s - ticket.dispatched_s)

    def answers_whole(self, ticket: Ticket) -> None:
        """An answer will come whole: its prefill is over when the model says."""
        after_s = ticket.decision.worker.work_ahead_s + ticket.prefill_s
        self._over[ticket] = asyncio.get_running_loop().call_later(after_s, self.prefill_is_over, ticket)

    def prefill_is_over(self, ticket: Ticket) -> None:
        """The next one of its worker has begun, for all that is known; nothing is timed."""
        self.dispatcher.answered(ticket, time.monotonic())

    def answered_whole(self, ticket: Ticket, num_passes: Callable[[], int | None]) -> None:
        """An answer has come whole; `num_passes` reads off it how many forward passes it took, if it says so."""
        took_s = time.monotonic() - ticket.dispatched_s
        if not self.latency.is_timed and _is_timed(ticket) and (number := num_passes()) is not None:
            self.latency.observe_whole(_num_cached(ticket), ticket.prompt.num_tokens, number, took_s)

    def refused(self, ticket: Ticket) -> None:
        """A worker has not served a request: nothing of it is put down to the worker."""
        self.dispatcher.refused(ticket, time.monotonic())
        self.ended(ticket)

    def ended(self, ticket: Ticket) -> None:
        """A request has finished, failed, or its client has gone; a second time does nothing."""
        self.dispatcher.ended(ticket, time.monotonic())
        over = self._over.pop(ticket, None)
        if over is not None:
            over.cancel()


def _num_cached(ticket: Ticket) -> int:
    return min(ticket.decision.worker.num_hit_tokens, ticket.prompt.num_tokens - 1)


def _is_timed(ticket: Ticket) -> bool:
    """Whether it had nothing ahead, and its tokens are known."""
    return not ticket.decision.worker.work_ahead_s and bool(ticket.prompt.chain.hashes)
