"""The fleet in a browser, and every rank's page, asked for with the workers' key, for who has the router's token."""

import asyncio
import base64
import re
from typing import Any
from urllib.parse import urljoin

from marconi.view.document import PageSource, document

from .house import house
from .stand_in import StandIn

TOKEN = "0123456789abcdef"  # noqa: S105


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()}


def test_the_page_is_one_file_whose_script_finds_every_element_that_it_names() -> None:
    async def story() -> None:
        async with house(StandIn("a")) as home:
            page = await home.get("/router/ui")
            assert page.headers["Content-Type"].startswith("text/html")
            text = page.body.decode()
            assert "{{" not in text
            assert re.findall(r"https?://|<(?:iframe|img)|src=|@import", text) == []
            _, _, script = text.rpartition("<script>")
            own = script[script.index("class StepChart") :]
            named = set(re.findall(r'\$\("([\w-]+)"\)', own))
            assert {"workers", "decisions", "absent", "summary"} <= named
            assert named <= set(re.findall(r'id="([\w-]+)"', text))
            (address,) = re.findall(r'fetch\("([^"]+)"', script)
            assert address == "../router", "from the page's own address"

    run(story())


def test_every_rank_has_its_page_behind_its_place_in_the_state() -> None:
    async def story() -> None:
        async with house(StandIn("a"), StandIn("b")) as home:
            page = await home.get("/router/ui/1/page")
            assert page.body.decode() == "b: /marconi/ui?dp_rank=0, no key"
            assert page.headers["Content-Type"].startswith("text/html")
            frame = await home.get("/router/ui/0/ui/frame")
            assert frame.body.decode() == "a: /marconi/ui/frame?dp_rank=0, no key"
            hour = await home.get("/router/ui/0/ui/history")
            assert hour.body.decode() == "a: /marconi/ui/history?dp_rank=0, no key"
            requests = await home.get("/router/ui/1/requests?dp_rank=7")
            assert requests.body.decode() == "b: /marconi/requests?dp_rank=0, no key"
            for index in ("2", "-1", "x", "00000000000000000000009"):
                refused = await home.get(f"/router/ui/{index}/page")
                assert (refused.status, "the rank must be 0 to 1, got" in refused.message) == (404, True)

    run(story())


def test_a_workers_page_leads_back_to_the_fleet_behind_a_router_alone() -> None:
    page = document("a worker", source=PageSource("ui/frame", "requests"))
    assert re.findall(r'<a id="fleet"([^>]*)>', page) == [" hidden"], "to begin with"
    ((shown, link),) = re.findall(
        r'if \(/(.+)/\.test\(location\.pathname\)\) Object.assign\(\$\("fleet"\), { href: "([^"]+)", hidden: false }',
        page,
    )

    async def story() -> None:
        async with house(StandIn("a")) as home:
            there = "/router/ui/0/page"
            back = urljoin(there, link)
            assert (back, (await home.get(back)).body) == ("/router/ui", (await home.get("/router/ui")).body)
            for path in (there, f"/behind/a/proxy{there}", "/router/ui/12/page"):
                assert re.search(shown, path), path
            for path in ("/marconi/ui", "/router/ui", "/home/me/tree.html", "/router/ui/0/page/x"):
                assert not re.search(shown, path), path

    run(story())


def test_workers_are_asked_with_their_key_and_browsers_for_the_token() -> None:
    async def story() -> None:
        async with house(StandIn("a"), token=TOKEN, worker_api_key="of-workers") as home:
            for path in (
                "/router",
                "/router/ui",
                "/router/ui/0/page",
                "/router/ui/0/ui/frame",
                "/router/ui/0/ui/history",
                "/router/ui/0/requests",
            ):
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
            assert (await home.get("/metrics", basic(TOKEN))).status == 401
            for right in (basic(TOKEN), {"Authorization": f"Bearer {TOKEN}"}):
                assert len((await home.get("/router", right)).json["workers"]) == 1, "the page reads it"

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
