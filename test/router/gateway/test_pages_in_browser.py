"""The fleet in a browser: the page shows what `GET /router` answers, and axe finds nothing wrong."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from browsing import Visit, visit  # noqa: F401 - a fixture
from marconi.view.document import PageSource, document

from .house import House, house
from .stand_in import StandIn

pytestmark = pytest.mark.browser

NUM_WORKERS = 3
TEXT = "the same words again and again"


class Pictured(StandIn):
    """A worker with a page of its own."""

    async def _page(self, request: web.Request) -> web.Response:
        page = document(self.name, source=PageSource("ui/frame", "requests"))
        return web.Response(text=page, content_type="text/html")


@dataclass
class Fleet:
    """A router and its workers, in a thread with an event loop of its own."""

    home: House
    workers: list[StandIn]
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"{self.home.url}/router/ui"

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def state(self) -> Any:
        return self.run(self.home.state())


@contextmanager
def served(*workers: StandIn) -> Iterator[Fleet]:
    found: Future[tuple[Fleet, asyncio.Event]] = Future()

    async def serve() -> None:
        try:
            async with house(*workers) as home:
                ends = asyncio.Event()
                found.set_result((Fleet(home, [*workers], asyncio.get_running_loop()), ends))
                await ends.wait()
        except BaseException as problem:
            if not found.done():
                found.set_exception(problem)
            raise

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    fleet, ends = found.result(60)
    try:
        yield fleet
    finally:
        fleet.loop.call_soon_threadsafe(ends.set)
        thread.join()


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Three workers, the last of which is down, after a few requests."""
    with served(*(Pictured(f"worker {index}") for index in range(NUM_WORKERS))) as fleet:
        for stream in (False, True, True, False):
            fleet.run(fleet.home.ask(TEXT, stream=stream))
        fleet.run(fleet.home.until_told(*fleet.workers))
        fleet.run(fleet.home.ask(TEXT))
        down = list(fleet.home.gateway.workers.values())[-1]
        fleet.run(fleet.workers[-1].kill())
        for _ in range(3):
            fleet.loop.call_soon_threadsafe(down.failed, "answers nothing")
        yield fleet


@pytest.fixture
def opened(visit: Callable[..., Visit], fleet: Fleet) -> Callable[..., Visit]:  # noqa: F811
    """Opens the fleet, and waits until the router has answered."""

    def drawn(*view: Any) -> Visit:
        found = visit(fleet.url, *view)
        found.page.wait_for_function(f"document.querySelectorAll('#workers tbody tr').length === {NUM_WORKERS}")
        return found

    return drawn


def violations(page: Any) -> list[tuple[str, list[Any]]]:
    """What axe finds in the page: rule and places."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [(each["id"], [place for node in each["nodes"] for place in node["target"]]) for each in found]


def cells(found: Visit, table: str) -> list[list[str]]:
    texts = "(row) => [...row.cells].map((cell) => cell.innerText)"
    rows: list[list[str]] = found.page.evaluate(f"[...$('{table}').tBodies[0].rows].map({texts})")
    return rows


def test_it_shows_the_routers_state_and_asks_for_nothing_else(opened: Callable[..., Visit], fleet: Fleet) -> None:
    found, state = opened(), fleet.state()
    workers = cells(found, "workers")
    assert [row[0] for row in workers] == [each["name"] for each in state["workers"]]
    assert [row[1] for row in workers] == ["up", "up", "down"]
    served = state["recent"][0]["worker"]
    (row,) = (row for row in workers if row[0] == served)
    latest = next(each["latest"] for each in state["workers"] if each["name"] == served)
    hits = latest["cached_tokens"]
    assert row[2:4] == [f"{100 * hits[name]['mean'] / hits['prompt']['mean']:.1f} %" for name in ("expected", "seen")]
    assert [text[-2:] for text in row[4:6]] == ["ms", "ms"]
    decisions = cells(found, "decisions")
    assert [row[1:6] for row in decisions] == [
        [each["worker"], each["reason"], *(f"{each[f'num_{name}_tokens']}" for name in ("prompt", "hit", "cached"))]
        for each in state["recent"]
    ]
    assert {row[8] for row in decisions} == {"200"}
    assert set(found.requests) - {"data:,"} == {fleet.url, f"{fleet.home.url}/router"}
    assert found.complaints == []


def test_hit_rates_of_the_last_hour_are_drawn_and_said(opened: Callable[..., Visit], fleet: Fleet) -> None:
    found, steps = opened(), fleet.state()["traffic"]["steps"]
    cached, reported = (sum(step[f"num_{name}_tokens"] for step in steps) for name in ("cached", "reported"))
    assert found.text("seen-text").startswith(f"{100 * cached / reported:.1f} % of the last hour's {reported} tokens")
    for name in ("seen", "expected", "prompts"):
        colors = (
            f"new Set(new Uint32Array($('{name}').getContext('2d').getImageData(0, 0, 4000, 200).data.buffer)).size"
        )
        assert found.page.evaluate(colors) > 3, name
    found.page.locator("details summary").click()
    assert len(cells(found, "numbers")) == len(steps)


def test_a_worker_that_is_down_is_said_in_words(opened: Callable[..., Visit], fleet: Fleet) -> None:
    found, down = opened(), fleet.workers[-1]
    why = fleet.state()["workers"][-1]["why"]
    assert why
    assert found.page.get_by_role("status").inner_text() == (
        f"{down.url} is down: {why}. Health checks try whether it is back."
    )
    assert found.text("summary").startswith(f"2 of {NUM_WORKERS} workers up, 0 requests running.")


def test_one_click_or_the_enter_key_leads_to_a_workers_page_and_back(
    opened: Callable[..., Visit], fleet: Fleet
) -> None:
    for index, press in enumerate((lambda link: link.click(), lambda link: link.press("Enter"))):
        page = opened().page
        press(page.get_by_role("link", name=fleet.workers[index].url))
        page.wait_for_url(f"{fleet.url}/{index}/page")
        assert page.title() == f"worker {index}"
        press(page.get_by_role("link", name="All workers"))
        page.wait_for_url(fleet.url)


def test_a_link_in_focus_keeps_it_while_the_page_is_updated(opened: Callable[..., Visit], fleet: Fleet) -> None:
    page = opened().page
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        if reached[-1] == fleet.workers[1].url:
            break
    assert "pause" in reached
    before = page.evaluate("fleet.time_s")
    page.wait_for_function(f"fleet.time_s > {before}")
    assert page.evaluate("document.activeElement.textContent") == fleet.workers[1].url


def test_updates_can_be_paused(opened: Callable[..., Visit]) -> None:
    page = opened().page
    page.get_by_role("button", name="Pause updates").click()
    page.wait_for_timeout(300)
    before = page.evaluate("fleet.time_s")
    page.wait_for_timeout(1500)
    assert page.evaluate("fleet.time_s") == before
    page.get_by_role("button", name="Resume updates").click()
    page.wait_for_function(f"fleet.time_s > {before}")


def test_a_router_that_stops_answering_is_said(opened: Callable[..., Visit]) -> None:
    page = opened().page
    page.route(
        "**/router", lambda route: route.fulfill(status=503, json={"error": {"message": "too many connections"}})
    )
    page.wait_for_function("$('summary').textContent === 'No update: too many connections'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400, 2560])
def test_axe_finds_no_violation(opened: Callable[..., Visit], scheme: str, width: int) -> None:
    page = opened(scheme, width).page
    page.locator("details summary").click()
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_axe_would_find_one(opened: Callable[..., Visit]) -> None:
    page = opened().page
    page.evaluate("$('pause').textContent = ''")
    assert violations(page) == [("button-name", ["#pause"])]
