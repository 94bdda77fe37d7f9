"""The way of a request through any router: the gateway and Ray Serve's request router are both built on it.

    body --reader--> ids, or a question for a worker's tokenizer --> hashes of blocks: a `RoutedRequest`
    RoutedRequest --dispatch--> Ticket --stream_began--> --ended | refused-->    what its worker has to do
    workers' events --EventFeed-->                                               what its workers hold

Prefills are timed as streams begin, or else from how long whole answers took, and the times fitted to the model's FLOPs
(`model.LearnedLatency`), with a factor for each worker (`pace.Paces`): whatever they are, a data sheet is believed only
until then. Only requests that had nothing ahead of them are timed. The prefill of an answer that comes whole ends
when the model says.

A prompt whose ids cannot be known (images, a body that its worker will refuse) is placed by how it begins and weighed
by its length; it has a hit nowhere.

Owner: the event loop that calls `start`. Long prompts are read on a thread, which touches the reader alone.
"""

import asyncio
import json
import time
from array import array
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from marconi.events.address import Keys
from marconi.events.hashes import HashSpace
from marconi.model.learned_latency import LearnedLatency
from marconi.router.dispatch import Dispatcher, Prompt, Ticket, key_of, prompt_of
from marconi.router.index import Chain, FleetIndex
from marconi.router.pace import Timed
from marconi.router.prompts import PromptReader, Reading
from marconi.router.prompts.remote import RemoteTokenizer
from marconi.router.routing import routing_of
from marconi.router.subscriber import EventFeed
from marconi.router.sync import Fleet, SyncLimits

QUICK_BYTES: Final = 16 << 10
"""The longest body that is read on the event loop: handing it to a thread would take longer."""
_BLOCK_TOKENS: Final = 64
"""Until a worker has said its own."""
_CHARACTERS_PER_TOKEN: Final = 4
_KEY_BYTES: Final = 4096
_GROUP: Final = "prompt_cache_key"
_METADATA: Final = "metadata"
"""Anthropic's field, whose `user_id` tells a client's conversations apart."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as it is routed."""

    prompt: Prompt
    is_known: bool
    """Whether the prompt's tokens are known; else its length is an estimate."""
    is_stream: bool
    ids: bytes | None = None
    """The prompt's tokens, eight bytes each, where they are known and kept."""


class RouterCore:
    """The dispatcher, the workers' events, and the tokenizer of one router."""

    def __init__(
        self,
        reader: PromptReader,
        latency: LearnedLatency,
        routing: str = "state-aware",
        keys: Keys | None = None,
        snapshot_period_s: float = 5.0,
        *,
        keeps_ids: bool = False,
    ) -> None:
        """`ValueError` for a routing that is unknown. With `keeps_ids`, a request has its prompt's tokens."""
        self.reader = reader
        self._keeps_ids = keeps_ids
        self.keys = keys
        self.routing = routing
        self.latency = latency
        self._limits = SyncLimits(snapshot_period_s=snapshot_period_s)
        fleet = Fleet(FleetIndex(_BLOCK_TOKENS), self._limits)
        self.dispatcher = Dispatcher(fleet, routing_of(routing, self.latency), self.latency)
        self.feed = EventFeed(lambda: self.dispatcher.fleet, keys)
        self.remote: RemoteTokenizer | None = None
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="marconi-router-prompts")
        self._prefill_ends: dict[Ticket, asyncio.TimerHandle] = {}
        """When prefills end by the model, of answers that come whole."""
        self._model: str | None = None
        """The model name in the namespace of the workers' hashes."""

    def start(self, tokenize: Callable[[bytes], Awaitable[bytes | None]] | None = None) -> None:
        """Receive workers' events on the running loop; `tokenize` posts to a worker's `/v1/tokenize`."""
        self.remote = None if tokenize is None else RemoteTokenizer(tokenize, self.run)
        self.feed.start()

    def close(self) -> None:
        """Stop receiving events."""
        self.feed.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def set_hashes(self, model: str | None, block_tokens: int) -> None:
        """Hash blocks of `block_tokens` for `model` from now on, as the workers do."""
        self._model = model
        if block_tokens != self.dispatcher.fleet.index.block_tokens:
            self.dispatcher.use_fleet(Fleet(FleetIndex(block_tokens), self._limits))

    # Prompts

    async def run(self, num_bytes: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call `function` here, or on a thread if its `num_bytes` exceed `QUICK_BYTES`."""
        if num_bytes <= QUICK_BYTES:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def read(
        self, route: str, body: Mapping[str, Any], num_bytes: int, session: str | None = None
    ) -> RoutedRequest:
        """Read a body into the request to route; `session` is its client's name for requests that belong together."""
        key = None if session is None else key_of(session.encode("utf-8", "surrogateescape"))
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
        named = body.get(_GROUP) or _user_of(body)
        group = key_of(named.encode("utf-8", "surrogatepass")) if isinstance(named, str) and named else None
        if reading.ids is not None:
            prompt = replace(prompt_of(reading.ids, space, self.dispatcher.fleet.index.block_tokens, key), group=group)
            ids = array("q", reading.ids).tobytes() if self._keeps_ids else None
            return RoutedRequest(prompt, True, reading.is_stream, ids)
        try:
            content = json.dumps(
                next((body[name] for name in ("messages", "prompt", "text") if name in body), body)
            ).encode()
        except RecursionError:
            content = b""
        if key is None:
            key = key_of(space.namespace + content[:_KEY_BYTES])
        num_tokens = max(len(content) // _CHARACTERS_PER_TOKEN, 1)
        return RoutedRequest(Prompt(Chain(space.namespace, ()), num_tokens, key, group), False, reading.is_stream)

    # Requests

    def dispatch(self, prompt: Prompt, among: Collection[str]) -> Ticket:
        """Give a request to one of the workers `among`; `ValueError` where there is none."""
        return self.dispatcher.dispatch(prompt, time.monotonic(), among)

    def stream_began(self, ticket: Ticket) -> None:
        """Note the first token of a stream: its prefill has ended, and is timed."""
        now_s = time.monotonic()
        self.dispatcher.answered(ticket, now_s)
        if _is_timed(ticket):
            self._learn(ticket, None, now_s)

    def expect_whole_answer(self, ticket: Ticket) -> None:
        """Note that an answer will come whole: its prefill ends when the model says."""
        after_s = ticket.decision.worker.work_ahead_s + ticket.prefill_s
        self._prefill_ends[ticket] = asyncio.get_running_loop().call_later(after_s, self.prefill_ended, ticket)

    def prefill_ended(self, ticket: Ticket) -> None:
        """Note that a prefill has probably ended, so that it is not timed."""
        self.dispatcher.answered(ticket, time.monotonic(), is_seen=False)

    def whole_answer_came(self, ticket: Ticket, num_passes: Callable[[], int | None]) -> None:
        """Time an answer that came whole; `num_passes` reads from it how many forward passes it took, if it says so."""
        now_s = time.monotonic()
        if not self.latency.is_timed and _is_timed(ticket) and (number := num_passes()) is not None:
            self._learn(ticket, number, now_s)

    def _learn(self, ticket: Ticket, num_passes: int | None, now_s: float) -> None:
        cached, prompt = ticket.num_cached_tokens, ticket.prompt.num_tokens
        waited_s = ticket.decision.worker.work_ahead_s
        timed = Timed(cached, prompt, now_s - ticket.dispatched_s, num_passes, waited_s)
        self.dispatcher.paces.observe(self.latency, ticket.worker, timed, now_s)

    def refused(self, ticket: Ticket) -> None:
        """Take a request back that its worker has not served: nothing of it counts as the worker's."""
        self.dispatcher.refused(ticket, time.monotonic())
        self.ended(ticket)

    def ended(self, ticket: Ticket) -> None:
        """End a request that has finished, failed, or whose client has disconnected; a second time does nothing."""
        self.dispatcher.ended(ticket, time.monotonic())
        timer = self._prefill_ends.pop(ticket, None)
        if timer is not None:
            timer.cancel()


def _is_timed(ticket: Ticket) -> bool:
    """True if a request had no prefill ahead of it, its tokens are known, and none of them may be read from a store."""
    is_computed = ticket.decision.worker.num_stored_tokens <= ticket.num_cached_tokens
    return ticket.is_next and is_computed and bool(ticket.prompt.chain.hashes)


def _user_of(body: Mapping[str, Any]) -> object:
    """The client that asks, where the `metadata` of a body names one."""
    metadata = body.get(_METADATA)
    return metadata.get("user_id") if isinstance(metadata, dict) else None
