"""A router on a loopback port in front of stand-ins, and what a client does."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from aiohttp import web

from marconi.events.address import Keys
from marconi.model.learned_latency import LearnedLatency
from marconi.router.gateway.app import ROUTER, application
from marconi.router.gateway.connections import running
from marconi.router.gateway.gateway import Gateway
from marconi.router.gateway.settings import HealthLimits, Settings
from marconi.router.prompts.check import Probe

from .stand_in import ByteReader, StandIn, answer_of, living

PATIENT = HealthLimits(max_failures=3, period_s=0.2, first_retry_s=0.05, timeout_s=10.0)
SETTINGS = Settings(port=0, health=PATIENT, connect_timeout_s=10.0)


@dataclass
class Answer:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        message: str = self.json["error"]["message"]
        return message

    @property
    def events(self) -> list[str]:
        """Of a stream."""
        return [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]


@dataclass
class House:
    """A router, and a client of it."""

    url: str
    app: web.Application
    client: aiohttp.ClientSession

    @property
    def gateway(self) -> Gateway:
        return self.app[ROUTER].gateway

    async def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **(headers or {})}
        async with self.client.post(self.url + path, data=data, headers=given) as answer:
            return Answer(answer.status, dict(answer.headers), await answer.read())

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        async with self.client.get(self.url + path, headers=headers) as answer:
            return Answer(answer.status, dict(answer.headers), await answer.read())

    async def ask(self, text: str, *, stream: bool = False, **more: Any) -> Answer:
        return await self.post("/generate", {"text": text, "stream": stream, **more})

    async def state(self) -> Any:
        return (await self.get("/router")).json

    async def until_up(self, number: int) -> None:
        await until(lambda: len(self.gateway.up()) >= number)

    async def until_told(self, *workers: StandIn) -> None:
        """Until the index knows exactly what the workers hold."""
        await until(lambda: all(knows(self.gateway, worker) for worker in workers))


def knows(gateway: Gateway, worker: StandIn) -> bool:
    """True if the index holds of a worker exactly what it holds.

    Numbers would not do: while events are on their way, one may be missing and another be too many.
    """
    index, held = gateway.dispatcher.fleet.index, worker.holding
    if worker.url not in index.workers:
        return False
    kv = {block_hash: namespace for namespace, blocks in held.spaces.items() for block_hash in blocks}
    states = {block_hash: namespace for namespace, block_hash in held.states}
    known = index.holding(worker.url)
    return (known.kv, known.states) == (kv, states) and not held.num_waiting


async def until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait until something holds; `AssertionError` if it never does."""
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s, "it never came to be"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def routed(
    *workers: StandIn,
    routing: str = "state-aware",
    keys: Keys | None = None,
    probes: Sequence[Probe] = (),
    **settings: Any,
) -> AsyncIterator[House]:
    """A router in front of workers that live elsewhere."""
    gateway = Gateway(ByteReader(), LearnedLatency(float), replace(SETTINGS, **settings), routing, keys)
    app = application(gateway, tuple(worker.url for worker in workers), lambda: probes)
    async with running(app, 0.1) as runner:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = "http://{}:{}".format(*runner.addresses[0][:2])
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), trust_env=False) as client:
            yield House(url, app, client)


@asynccontextmanager
async def house(*workers: StandIn, waits: bool = True, **options: Any) -> AsyncIterator[House]:
    """Workers and a router in front of them, all up if it `waits`."""
    async with living(*workers), routed(*workers, **options) as made:
        if waits:
            await made.until_up(len(workers))
        yield made


def right(text: str) -> str:
    """The right answer to a prompt."""
    return "".join(answer_of(text))
