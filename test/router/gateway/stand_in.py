"""A worker in place of SGLang: it keeps what it served, publishes it, answers by a rule, and fails on demand.

A token is a byte of the prompt's text; the answer is a function of the prompt (`answer_of`), so a wrong one is seen.
"""

import asyncio
import json
from collections import deque
from collections.abc import Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from itertools import takewhile
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from aiohttp import web

from marconi.events.address import Keys
from marconi.events.base import Event, KvRemoved, KvStored, StateRemoved, StateStored
from marconi.events.codec import VERSION, Published
from marconi.events.hashes import HashSpace
from marconi.events.publisher import Publisher, PublisherOptions
from marconi.router.dispatch import prompt_of
from marconi.router.prompts import PromptKind, Reading

BLOCK_TOKENS = 8
MODEL = "a-model"
NUM_WORDS = 4


def answer_of(text: str) -> list[str]:
    """What every worker answers to a prompt, in pieces."""
    digest = sha256(text.encode()).hexdigest()
    return [digest[index * 8 : index * 8 + 8] for index in range(NUM_WORDS)]


class ByteReader:
    """Reads a prompt as the stand-in does."""

    def __init__(self, kinds: Set[PromptKind] = frozenset(PromptKind), model: str | None = None) -> None:
        self.kinds = frozenset(kinds)
        self.model = model

    def for_workers(self, kinds: Set[PromptKind], model: str | None = None) -> "ByteReader":
        return ByteReader(kinds, model)

    def read(self, route: str, body: dict[str, Any]) -> Reading:
        text, is_stream = body.get("text"), body.get("stream") is True
        space = body.get("extra_key"), body.get("cache_salt")
        if body.get("image_data") or not is_text(text):
            return Reading(None, *space, is_stream)
        if PromptKind.TEXTS not in self.kinds:
            return Reading(None, *space, is_stream, {"prompt": text})
        return Reading(list(text.encode()), *space, is_stream)


def is_text(value: object) -> bool:
    """Whether a stand-in takes it for a prompt."""
    return (
        isinstance(value, str)
        and bool(value)
        and value.encode("utf-8", "replace") == value.encode("utf-8", "surrogatepass")
    )


class Fault(StrEnum):
    """What happens to a request."""

    NONE = "none"
    REFUSES = "answers 503"
    HANGS = "sends nothing"
    BREAKS = "closes the connection before a byte"
    BREAKS_LATER = "closes the connection within the answer"
    SLOW = "takes its time"


class Holding:
    """What a worker holds: blocks and, after some of them, states."""

    def __init__(self) -> None:
        self.spaces: dict[bytes, dict[int, tuple[int | None, int]]] = {}
        """Namespace -> hash of a block -> the one before it, and its depth in tokens."""
        self.states: set[tuple[bytes, int]] = set()
        self._waiting: deque[Event] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def drain(self) -> Sequence[Published]:
        return [Published(self._waiting.popleft()) for _ in range(len(self._waiting))]

    def held(self) -> tuple[Event, ...]:
        events: list[Event] = []
        for namespace, blocks in list(self.spaces.items()):
            for block_hash, (parent, _) in list(blocks.items()):
                events.append(KvStored((block_hash,), parent, namespace, BLOCK_TOKENS))
            for block_hash, (_, depth) in list(blocks.items()):
                if (namespace, block_hash) in self.states:
                    events.append(StateStored(block_hash, depth, namespace))
        return tuple(events)

    def close(self) -> None:
        self._waiting.clear()

    def forget(self, rng: Random) -> None:
        """Evict a state, or the last block of a branch and what stands there."""
        if self.states and rng.random() < 0.5:
            self._drop_state(rng.choice(sorted(self.states)))
            return
        for namespace, blocks in self.spaces.items():
            parents = {parent for parent, _ in blocks.values()}
            leaves = sorted(block_hash for block_hash in blocks if block_hash not in parents)
            if leaves:
                leaf = rng.choice(leaves)
                if (namespace, leaf) in self.states:
                    self._drop_state((namespace, leaf))
                del blocks[leaf]
                self._waiting.append(KvRemoved((leaf,)))
                return

    def _drop_state(self, place: tuple[bytes, int]) -> None:
        self.states.remove(place)
        self._waiting.append(StateRemoved(place[1]))

    def hit(self, space: HashSpace, hashes: Sequence[int]) -> int:
        """Tokens of a prompt up to the deepest state."""
        blocks = self.spaces.get(space.namespace, {})
        held = list(takewhile(lambda each: each in blocks, hashes))
        depths = [index + 1 for index, each in enumerate(held) if (space.namespace, each) in self.states]
        return max(depths, default=0) * BLOCK_TOKENS

    def keep(self, space: HashSpace, hashes: Sequence[int]) -> None:
        blocks = self.spaces.setdefault(space.namespace, {})
        parent: int | None = None
        for index, block_hash in enumerate(hashes):
            if block_hash not in blocks:
                blocks[block_hash] = (parent, (index + 1) * BLOCK_TOKENS)
                self._waiting.append(KvStored((block_hash,), parent, space.namespace, BLOCK_TOKENS))
            parent = block_hash
        if hashes and (space.namespace, hashes[-1]) not in self.states:
            self.states.add((space.namespace, hashes[-1]))
            self._waiting.append(StateStored(hashes[-1], len(hashes) * BLOCK_TOKENS, space.namespace))


@dataclass
class StandIn:
    """One worker, on a loopback port of its own."""

    name: str
    port: int = 0
    model: str = MODEL
    fault: Fault = Fault.NONE
    tells: bool = True
    keys: Keys | None = None
    max_context_tokens: int | None = None
    """What it says of itself."""
    step_s: float = 0.0
    """Between two pieces of an answer."""
    holding: Holding = field(default_factory=Holding)
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all requests."""
    questions: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of what it was asked to tokenize."""
    went_with: list[str] = field(default_factory=list)
    """Prompts that it had, and had not answered to the end, when it went or broke."""
    num_hit_tokens: list[int] = field(default_factory=list)
    num_aborted: int = 0
    is_healthy: bool = True
    loads: Any = None
    """What it answers to `GET /v1/loads`; 404 without."""
    publisher: Publisher | None = None
    _runner: web.AppRunner | None = None
    _goes: bool = False
    _events: tuple[str, str] = ("", "")
    _folder: "TemporaryDirectory[str] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Live, with nothing held; at the same port as before, if it lived before."""
        self.holding = Holding()
        self._goes = False
        app = web.Application(client_max_size=1 << 30)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/marconi", self._marconi)
        app.router.add_get("/marconi/ui", self._page)
        app.router.add_get("/marconi/ui/frame", self._page)
        app.router.add_get("/marconi/ui/history", self._page)
        app.router.add_get("/marconi/requests", self._page)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/v1/tokenize", self._tokenize)
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"):
            app.router.add_post(path, self._generate)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        if self.tells:
            self._folder = self._folder or TemporaryDirectory(prefix="marconi-stand-in-")
            self._events = (f"ipc://{self._folder.name}/events", f"ipc://{self._folder.name}/replay")
            self.publisher = self._publisher(self.holding, self.name, self._events)

    def _publisher(self, holding: Holding, name: str, events: tuple[str, str]) -> Publisher:
        return Publisher(holding, PublisherOptions(name, *events, BLOCK_TOKENS, keys=self.keys, period_s=0.02))

    async def kill(self) -> None:
        """Gone: connections break where they are, and nothing that was not published yet is published."""
        assert self._runner is not None
        self._goes = True
        # At once: a schedule that fails ends its workers while one of them may be on its way out.
        (runner, self._runner), (publisher, self.publisher) = (self._runner, None), (self.publisher, None)
        server = runner.server
        assert server is not None
        for site in list(runner.sites):
            await site.stop()
        for connection in list(server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        if publisher is not None:
            await asyncio.to_thread(publisher.close)
        await runner.cleanup()

    @property
    def lives(self) -> bool:
        return self._runner is not None

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model, "served_model_name": self.model, "is_generation": True})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model}], "from": self.name})

    async def _page(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "no key")
        return web.Response(text=f"{self.name}: {request.path_qs}, {key}", content_type="text/html")

    async def _marconi(self, _: web.Request) -> web.Response:
        return web.json_response({"ranks": [{"events": self._said(self.name, self._events) if self.tells else None}]})

    def _said(self, name: str, events: tuple[str, str]) -> dict[str, Any]:
        return {
            "version": VERSION,
            "worker": name,
            "events": events[0],
            "replay": events[1],
            "needs_keys": self.keys is not None,
            "model": self.model,
            "block_tokens": BLOCK_TOKENS,
            "max_context_tokens": self.max_context_tokens,
        }

    def _holding_of(self, _: dict[str, Any]) -> Holding:
        """What serves a body."""
        return self.holding

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.questions.append(body)
        return await self.tokenize(body)

    async def tokenize(self, body: dict[str, Any]) -> web.Response:
        if not is_text(body.get("prompt")):
            return web.json_response({"error": {"message": f"{self.name} takes texts"}}, status=400)
        return web.json_response({"tokens": list(body["prompt"].encode())})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    async def _loads(self, _: web.Request) -> web.Response:
        return web.Response(status=404) if self.loads is None else web.json_response(self.loads)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append(body)
        try:
            return await self._answer(request, body)
        except asyncio.CancelledError:
            self.num_aborted += 1
            if self._goes or self.fault in (Fault.HANGS, Fault.BREAKS, Fault.BREAKS_LATER):
                self.went_with.append(body["text"])
            raise

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault, text = self.fault, body.get("text")
        if fault is Fault.REFUSES:
            return web.json_response({"error": {"message": "full"}}, status=503)
        if fault is Fault.HANGS:
            await asyncio.sleep(3600)
        if fault is Fault.BREAKS:
            assert request.transport is not None
            request.transport.abort()
            await asyncio.sleep(3600)
        if body.get("wrong") and body.get("stream"):
            # As SGLang's `/generate` has it.
            said = {"error": {"message": f"{self.name} says no", "type": "invalid_request_error", "code": 400}}
            return web.Response(
                body=f"data: {json.dumps(said, separators=(',', ':'))}\n\ndata: [DONE]\n\n".encode(),
                content_type="text/event-stream",
            )
        if body.get("wrong"):
            return web.json_response({"error": {"message": f"{self.name} says no"}}, status=400)
        if not is_text(text):
            return web.json_response({"error": {"message": f"{self.name} takes texts"}}, status=400)
        space = HashSpace.of(self.model, body.get("extra_key"), body.get("cache_salt"))
        hashes = prompt_of(list(text.encode()), space, BLOCK_TOKENS).chain.hashes
        holding = self._holding_of(body)
        hit = holding.hit(space, hashes)
        self.num_hit_tokens.append(hit)
        words = answer_of(text)
        if not body.get("stream"):
            await asyncio.sleep(self.step_s)
            holding.keep(space, hashes)
            told = {"cached_tokens": hit, "completion_tokens": NUM_WORDS}
            return web.json_response({"text": "".join(words), "meta_info": told, "by": self.name})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Secret": "not relayed"})
        await answer.prepare(request)
        for index in range(len(words)):
            if fault is Fault.SLOW or (self.step_s and index):
                await asyncio.sleep(self.step_s or 0.05)
            if fault is Fault.BREAKS_LATER and index == 2:
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(3600)
            sofar = {"text": "".join(words[: index + 1]), "meta_info": {"cached_tokens": hit}, "by": self.name}
            await answer.write(f"data: {json.dumps(sofar)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        holding.keep(space, hashes)
        await answer.write_eof()
        return answer


@asynccontextmanager
async def living(*workers: StandIn) -> Any:
    """Workers that live within the block."""
    try:
        for worker in workers:
            await worker.start()
        yield workers
    finally:
        for worker in workers:
            if worker.lives:
                await worker.kill()
            if worker._folder is not None:
                worker._folder.cleanup()
                worker._folder = None
