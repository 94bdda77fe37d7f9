"""What passes between a client and a worker: nothing of a connection, of another client or of this router's own."""

import asyncio
import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from .house import House, house, right
from .stand_in import StandIn


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


@dataclass
class Seeing(StandIn):
    """A worker that keeps the headers of what it is asked, and gives some of its own."""

    seen: list[CIMultiDict[str]] = field(default_factory=list)
    gives: Mapping[str, str] = field(default_factory=dict)
    sends_to: str | None = None

    @property
    def url(self) -> str:
        # To an address in numbers a client keeps no cookies.
        return f"http://localhost:{self.port}"

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(CIMultiDict(request.headers))
        if self.sends_to is not None:
            raise web.HTTPTemporaryRedirect(self.sends_to + "/generate")
        answer = await super()._generate(request)
        answer.headers.update(self.gives)
        return answer


async def raw(home: House, head: bytes, body: bytes) -> int:
    """The status of what is answered to a `head` that no client library would send."""
    host, port = home.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head + f"Host: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(answer.split(b" ", 2)[1])


def test_a_cookie_of_one_clients_answer_is_not_sent_with_anothers_request() -> None:
    async def story() -> None:
        worker = Seeing("a")
        worker.gives = {"Set-Cookie": "session=of-the-first; Path=/"}
        async with house(worker) as home:
            await home.ask("first")
            await home.ask("second")
            assert ["Cookie" in seen for seen in worker.seen] == [False, False]

    run(story())


def test_a_clients_own_cookies_are_passed_on() -> None:
    async def story() -> None:
        worker = Seeing("a")
        async with house(worker) as home:
            await home.post("/generate", {"text": "hello"}, {"Cookie": "mine=1"})
            assert worker.seen[0]["Cookie"] == "mine=1"

    run(story())


def test_a_worker_that_sends_elsewhere_is_not_followed_there() -> None:
    async def story() -> None:
        worker, elsewhere = Seeing("a"), Seeing("b")
        async with house(worker) as home:
            await elsewhere.start()
            try:
                worker.sends_to = elsewhere.url
                answer = await home.ask("a secret of mine")
                assert answer.status == 307
                assert not elsewhere.asked
            finally:
                await elsewhere.kill()

    run(story())


def test_a_compressed_body_reaches_a_worker_as_what_it_says_it_is() -> None:
    async def story() -> None:
        worker = Seeing("a")
        async with house(worker) as home:
            body = gzip.compress(json.dumps({"text": "hello"}).encode())
            answer = await home.post("/generate", body, {"Content-Encoding": "gzip"})
            assert (answer.status, answer.json["text"]) == (200, right("hello"))
            assert "Content-Encoding" not in worker.seen[0]
            broken = await home.post("/generate", b"no gzip", {"Content-Encoding": "gzip"})
            assert (broken.status, "\n" in broken.message) == (400, False)

    run(story())


def test_a_worker_is_not_told_to_compress_what_is_relayed_without_saying_how() -> None:
    async def story() -> None:
        worker = Seeing("a")
        async with house(worker) as home:
            await home.post("/generate", {"text": "hello"}, {"Accept-Encoding": "gzip"})
            assert worker.seen[0].getall("Accept-Encoding") == ["identity"]

    run(story())


def test_headers_of_a_connection_are_left_out_wherever_they_are_named() -> None:
    async def story() -> None:
        worker = Seeing("a")
        async with house(worker) as home:
            head = b"POST /generate HTTP/1.1\r\nConnection: X-First\r\nConnection: X-Second\r\n"
            head += b"X-First: 1\r\nX-Second: 2\r\nX-Third: 3\r\n"
            assert await raw(home, head, b'{"text": "hello"}') == 200
            (seen,) = worker.seen
            assert [name in seen for name in ("X-First", "X-Second", "X-Third")] == [False, False, True]

    run(story())


def test_a_header_that_is_not_unicode_fails_no_request() -> None:
    async def story() -> None:
        worker = Seeing("a")
        async with house(worker, session_header="X-Session", tenant_header="X-Tenant") as home:
            for name in (b"X-Name", b"X-Session"):
                head = b"POST /generate HTTP/1.1\r\nX-Tenant: red\r\n" + name + b": Jos\xe9\r\n"
                assert await raw(home, head, b'{"text": "hello"}') == 200
            assert len(worker.seen) == 2

    run(story())


def test_a_token_that_is_not_unicode_is_a_wrong_one() -> None:
    async def story() -> None:
        async with house(StandIn("a"), token="0123456789abcdef") as home:  # noqa: S106
            assert await raw(home, b"GET /router HTTP/1.1\r\nAuthorization: Bearer \xff\r\n", b"") == 401

    run(story())
