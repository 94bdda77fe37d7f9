"""The fleet in a browser: every rank's page, asked for with the workers' key, for who has the router's token."""

import asyncio
import base64
from typing import Any

from .house import house
from .stand_in import StandIn

TOKEN = "0123456789abcdef"  # noqa: S105


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()}


def test_the_page_has_a_frame_for_every_rank() -> None:
    async def story() -> None:
        async with house(StandIn("a"), StandIn("b")) as home:
            text = (await home.get("/router/ui")).body.decode()
            assert text.count("<iframe") == 2
            assert 'src="ui/1/page"' in text
            for worker in home.gateway.workers.values():
                assert worker.url in text
            page = await home.get("/router/ui/1/page")
            assert page.body.decode() == "b: /marconi/ui?dp_rank=0, no key"
            assert page.headers["Content-Type"].startswith("text/html")
            frame = await home.get("/router/ui/0/ui/frame")
            assert frame.body.decode() == "a: /marconi/ui/frame?dp_rank=0, no key"
            requests = await home.get("/router/ui/1/requests?dp_rank=7")
            assert requests.body.decode() == "b: /marconi/requests?dp_rank=0, no key"
            for index in ("2", "-1", "x", "00000000000000000000009"):
                refused = await home.get(f"/router/ui/{index}/page")
                assert (refused.status, "the rank must be 0 to 1, got" in refused.message) == (404, True)

    run(story())


def test_workers_are_asked_with_their_key_and_browsers_for_the_token() -> None:
    async def story() -> None:
        async with house(StandIn("a"), token=TOKEN, worker_api_key="of-workers") as home:
            for path in ("/router/ui", "/router/ui/0/page", "/router/ui/0/ui/frame", "/router/ui/0/requests"):
                for wrong in ({}, basic(TOKEN[:-1]), {"Authorization": "Basic ~"}, {"Authorization": "Bearer no"}):
                    refused = await home.get(path, wrong)
                    assert refused.status == 401
                    assert refused.headers["WWW-Authenticate"].startswith("Basic ")
                for right in (basic(TOKEN), {"Authorization": f"Bearer {TOKEN}"}):
                    assert (await home.get(path, right)).status == 200
            page = await home.get("/router/ui/0/page", basic(TOKEN))
            assert page.body.decode() == "a: /marconi/ui?dp_rank=0, Bearer of-workers"

    run(story())


def test_a_password_that_a_browser_sends_by_itself_changes_nothing() -> None:
    async def story() -> None:
        async with house(StandIn("a"), token=TOKEN) as home:
            answer = await home.post("/router/workers", {"url": "http://127.0.0.1:9"}, basic(TOKEN))
            assert (answer.status, len(home.gateway.workers)) == (401, 1)
            assert (await home.get("/router", basic(TOKEN))).status == 401

    run(story())


def test_a_worker_that_does_not_answer_is_named() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            await worker.kill()
            answer = await home.get("/router/ui/0/page")
            assert answer.status == 502
            assert answer.body.decode().startswith(f"{worker.url} does not answer")

    run(story())
