"""What passes between a client and a worker: nothing of a connection, of another client or of this router's own."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from .house import house
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


def test_a_worker_is_not_told_to_compress_what_is_relayed_without_saying_how() -> None:
    async def story() -> None:
        worker = Seeing("a")
        async with house(worker) as home:
            await home.post("/generate", {"text": "hello"}, {"Accept-Encoding": "gzip"})
            assert worker.seen[0].getall("Accept-Encoding") == ["identity"]

    run(story())
