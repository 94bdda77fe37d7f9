"""A prefill server and a decode server behind one address, as a router puts them there.

Each request goes to both, with a room in which they meet; the client gets what the decode server answers.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from marconi.process import LOOPBACK, free_ports
from marconi_cpu.demo.server_process import ServerProcess

from .conftest import EntryPoint, Launch

SERVER = (str(Path(__file__).with_name("disaggregated_server.py")),)
_ROLE = "--disaggregation-transfer-backend", "mooncake", "--disaggregation-mode"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers that answer as one at `url`."""

    url: str
    prefill: ServerProcess
    decode: ServerProcess

    @property
    def log_path(self) -> Path:
        """That of the server that has a cache."""
        return self.prefill.log_path


@contextmanager
def disaggregated(
    launch: Launch, models: dict[str, Path], preload: EntryPoint, logs: Path, prefill_args: tuple[str, ...] = ()
) -> Iterator[Pair]:
    """`launch` as a prefill server, with `prefill_args` besides, and as a decode server."""
    bootstrap = free_ports(1)

    def server(role: str, *more: str) -> ServerProcess:
        args = (*launch.args, *more, *_ROLE, role, "--disaggregation-bootstrap-port", str(bootstrap))
        return replace(launch, args=args).process(models, logs / role, entry_point=preload(launch.entry_point))

    with (
        server("prefill", *prefill_args) as prefill,
        server("decode") as decode,
        _front(prefill.url, decode.url, bootstrap) as url,
    ):
        yield Pair(url, prefill, decode)


@contextmanager
def _front(prefill: str, decode: str, bootstrap: int) -> Iterator[str]:
    """The address of both, served by a thread."""
    rooms = count(1)

    async def generate(request: web.Request) -> web.StreamResponse:
        told = {"bootstrap_host": LOOPBACK, "bootstrap_port": bootstrap, "bootstrap_room": next(rooms)}
        body = await request.json() | told
        patience = aiohttp.ClientTimeout(300)
        async with aiohttp.ClientSession(timeout=patience) as session, asyncio.TaskGroup() as group:
            group.create_task(_drain(session, f"{prefill}/generate", body))
            async with session.post(f"{decode}/generate", json=body) as answer:
                relayed = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                await relayed.prepare(request)
                async for piece in answer.content.iter_any():
                    await relayed.write(piece)
                return relayed

    async def flush(_: web.Request) -> web.Response:
        async with aiohttp.ClientSession() as session:
            for url in (prefill, decode):
                async with session.post(f"{url}/flush_cache?timeout=30", raise_for_status=True):
                    pass
        return web.Response()

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/flush_cache", flush)
    with _served(app) as url:
        yield url


async def _drain(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
    async with session.post(url, json=body) as answer:
        await answer.read()


@contextmanager
def _served(app: web.Application) -> Iterator[str]:
    """The address of `app`."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(app, handler_cancellation=True)

    async def start() -> str:
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, 0).start()
        return "http://{}:{}".format(*runner.addresses[0][:2])

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(60.0)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
