"""Who holds connections without asking anything keeps nobody else out for long, and an operator never."""

import ast
import asyncio
import logging
import resource
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from marconi.router.gateway import connections
from marconi.router.gateway.connections import CONNECTIONS, RESERVE, most_connections

from .house import House, house, right, until
from .stand_in import StandIn

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def run(story: Callable[[], Coroutine[Any, Any, None]], loop: str) -> None:
    """On a loop as a router has it: uvloop's where that is installed."""
    factory = None if loop == "asyncio" else pytest.importorskip(loop).new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(asyncio.wait_for(story(), 60))


@pytest.fixture(params=[pytest.param("asyncio", marks=pytest.mark.slow), "uvloop"])
def loop(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@asynccontextmanager
async def connected(home: House, number: int = 1, sends: bytes = b"") -> AsyncIterator[list[Streams]]:
    """So many connections that have sent the same."""
    at = urlsplit(home.url)
    opened: list[Streams] = []
    try:
        for _ in range(number):
            opened.append(await asyncio.open_connection(at.hostname, at.port))
            opened[-1][1].write(sends)
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def asked_once(home: House, method: str, path: str, body: bytes = b"") -> bytes:
    """What comes back on a connection of its own."""
    head = f"{method} {path} HTTP/1.1\r\nHost: r\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with connected(home, sends=head + body) as ((reader, _),):
        return await reader.read()


HEALTH = b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n"


def test_nothing_private_of_aiohttp_is_used() -> None:
    async def private() -> set[str]:
        async def handler(_: web.BaseRequest) -> web.Response:
            return web.Response()

        server = web.Server(handler)
        names = {name for each in (server, server(), web.AppRunner, web.ServerRunner) for name in dir(each)}
        return {name for name in names if name.startswith("_") and not name.startswith("__")}

    written = ast.walk(ast.parse(Path(connections.__file__).read_text()))
    used = {
        name
        for node in written
        for name in (getattr(node, "attr", ""), getattr(node, "name", ""), *getattr(node, "module", "").split("."))
    }
    assert {"_waiter", "_kwargs", "_make_server"} <= (theirs := asyncio.run(private()))
    assert not used & theirs
    assert "web_protocol" not in used


@pytest.mark.parametrize("before", [b"", HEALTH], ids=["first", "second"])
def test_a_connection_whose_headers_trickle_is_closed(loop: str, before: bytes) -> None:
    async def story() -> None:
        async with (
            house(StandIn("a"), idle_timeout_s=0.3) as home,
            connected(home, sends=before) as ((reader, writer),),
        ):
            if before:
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"POST /generate HTTP/1.1\r\n")

            async def trickle() -> None:
                while True:
                    writer.write(b"X-More: 1\r\n")
                    await asyncio.sleep(0.02)

            trickling = asyncio.create_task(trickle())
            # Closed with some of the trickle unread, a connection ends with a reset.
            with suppress(ConnectionResetError):
                assert await reader.read() == b"", "an answer might be taken for that to a next request"
            trickling.cancel()
            await until(lambda: home.app[CONNECTIONS].num_open == 0)

    run(story, loop)


@pytest.mark.slow
def test_connections_whose_headers_do_not_go_on_leave_room_for_others(loop: str) -> None:
    async def story() -> None:
        async with (
            house(StandIn("a"), max_connections=20, idle_timeout_s=5.0) as home,
            connected(home, 20, b"GET /health HTTP/1.1\r\n") as opened,
        ):
            await until(lambda: home.app[CONNECTIONS].num_open == 20)
            assert (await asked_once(home, "POST", "/generate", b'{"text": "a"}')).startswith(b"HTTP/1.1 503 ")
            for reader, _ in opened:
                assert await reader.read() == b""
            assert (await home.ask("hello")).json["text"] == right("hello")

    run(story, loop)


def test_a_connection_that_sends_nothing_is_closed_and_one_that_is_idle_later(loop: str) -> None:
    async def story() -> None:
        async with (
            house(StandIn("a"), idle_timeout_s=4.0) as home,
            connected(home) as ((silent, _),),
            connected(home, sends=HEALTH) as ((idle, writer),),
        ):
            await idle.readuntil(b"\r\n\r\n")
            await asyncio.sleep(1.0)
            asked_s = time.monotonic()
            writer.write(HEALTH)
            assert (await idle.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await silent.read() == b"", "it has asked nothing"
            assert await idle.read() == b""
            # From its first request on it would have been 3 s.
            assert time.monotonic() - asked_s > 3.5, "its time begins at its answer"

    run(story, loop)


def test_a_request_that_takes_long_to_answer_is_not_cut_by_the_limits_of_connections(loop: str) -> None:
    async def story() -> None:
        async with house(StandIn("a", step_s=0.2), idle_timeout_s=0.1) as home:
            assert (await home.ask("hello", stream=True)).events[-1] == "[DONE]"

    run(story, loop)


def test_a_connection_of_the_reserve_has_one_request_which_takes_as_long_as_it_does(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_RESERVE_TIMEOUT_S", 1.0)

    async def story() -> None:
        async with house(StandIn("a"), max_connections=1) as home, connected(home):
            head = b"POST /router/workers HTTP/1.1\r\nHost: r\r\nContent-Type: application/json\r\n"
            async with connected(home, sends=head + b"Content-Length: 2\r\n\r\n") as ((reader, writer),):
                await asyncio.sleep(1.5)
                writer.write(b"{}")
                assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 400 "), "it has no url"
            assert (await asyncio.wait_for(asked_once(home, "POST", "/health"), 20)).startswith(b"HTTP/1.1 405 ")

    run(story, loop)


def test_where_all_connections_are_taken_an_operator_still_gets_through(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with house(StandIn("a"), max_connections=3) as home:
            limited = home.app[CONNECTIONS]
            async with connected(home, 3):
                await until(lambda: limited.num_open == 3)
                for path in ("/health", "/router", "/metrics"):
                    assert (await asked_once(home, "GET", path)).startswith(b"HTTP/1.1 200 ")
                for _ in range(20):
                    refused = await asked_once(home, "POST", "/generate", b'{"text": "hello"}')
                    assert refused.startswith(b"HTTP/1.1 503 ")
                    assert b"the router has 3 connections, as many as it may have" in refused
            await until(lambda: limited.num_open == 0)
            assert (await home.ask("hello")).json["text"] == right("hello")
            metrics = (await home.get("/metrics")).body.decode()
            assert "marconi_router_connections_refused_total 20.0" in metrics

    with caplog.at_level(logging.WARNING):
        run(story, loop)
    assert [record.message for record in caplog.records] == [
        "marconi: the router has 3 connections, as many as it may have (--max-connections): 1 refused"
    ]


@pytest.mark.slow
def test_connections_beyond_the_reserve_are_refused_unread_and_nobody_holds_it_for_long(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Long enough for all to be there at once, on a busy machine too.
    monkeypatch.setattr(connections, "_RESERVE_TIMEOUT_S", 5.0)

    async def story() -> None:
        async with house(StandIn("a"), max_connections=2) as home:
            limited = home.app[CONNECTIONS]
            async with connected(home, 2 + RESERVE):
                await until(lambda: limited.num_open == 2 + RESERVE)
                assert (await asked_once(home, "GET", "/health")).startswith(b"HTTP/1.1 503 ")
                assert limited.num_open == 2 + RESERVE
                await until(lambda: limited.num_open == 2)
                assert (await asked_once(home, "GET", "/health")).startswith(b"HTTP/1.1 200 ")

    run(story, loop)


def test_connections_have_room_in_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert 3 * (most_connections() + RESERVE) < 1024 - 100
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert most_connections() > 1 << 20


MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "a wrong version": b"GET /health HTTP/9.9\r\nHost: r\r\n\r\n",
    "no method": b"/health HTTP/1.1\r\n\r\n",
    "a wrong method": b"G\x00T /health HTTP/1.1\r\n\r\n",
    "a wrong header": b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
    "a header with a zero": b"GET /health HTTP/1.1\r\nX: \x00\r\n\r\n",
    "two lengths": b"POST /generate HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "a wrong length": b"POST /generate HTTP/1.1\r\nContent-Length: -1\r\n\r\n{}",
    "a length and chunks": b"POST /generate HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    "a long line": b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
    "a long header": b"GET /health HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
    "many headers": b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
    "many headers without an end": b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 200,
    "wrong chunks": b"POST /generate HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "a chunk that ends late": (
        b"POST /generate HTTP/1.1\r\nHost: r\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{}}}}}}\r\n0\r\n\r\n"
    ),
}


@pytest.mark.parametrize("sends", MALFORMED.values(), ids=MALFORMED)
def test_bad_http_is_a_line_to_the_client_and_one_at_most_in_the_log(
    loop: str, sends: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            async with connected(home, sends=sends) as ((reader, _),):
                answer = await asyncio.wait_for(reader.read(), 20)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ", b"HTTP/1.1 431 ")), answer
            assert body.startswith(b'{"object": "error", "error": {"message": ')
            assert b"\n" not in body
            assert b"Traceback" not in answer
            assert not worker.asked
            assert (await home.ask("still there")).status == 200
            await until(lambda: not home.gateway.dispatcher.num_running(worker.url))

    with caplog.at_level(logging.WARNING):
        run(story, loop)
    assert len(caplog.records) <= 1
    assert not any(record.exc_info or "\n" in record.getMessage() for record in caplog.records)
