"""The fleet in a browser: all pages of workers are drawn side by side, and axe finds nothing in any."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from browsing import Visit, frames_of, html, visit  # noqa: F401 - fixtures
from marconi.view.document import PageSource, document

from .house import house
from .stand_in import StandIn

pytestmark = pytest.mark.browser

NUM_WORKERS = 3
PATHS = ("page", "ui/frame?dp_rank=0", "requests?dp_rank=0")
DRAWN = "document.getElementById('summary').textContent.includes('requests so far')"
NUM_COLORS = "new Set(new Uint32Array($('tree').getContext('2d').getImageData(0, 0, 300, 300).data.buffer)).size"


@dataclass
class Pictured(StandIn):
    """A worker with the live page of a server, which always gets the same frame."""

    frame: dict[str, Any] = field(default_factory=dict)

    async def _page(self, request: web.Request) -> web.Response:
        if request.path == "/marconi/ui":
            source = PageSource("ui/frame?dp_rank=0", "requests?dp_rank=0")
            return web.Response(text=document(self.name, source=source), content_type="text/html")
        return web.json_response(self.frame if request.path == "/marconi/ui/frame" else {"ranks": [{"requests": []}]})


@contextmanager
def fleet(*workers: StandIn) -> Iterator[str]:
    """A router in front of `workers`, in a thread with an event loop of its own; yields its address."""
    found: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        try:
            async with house(*workers) as home:
                ends = asyncio.Event()
                found.set_result((home.url, asyncio.get_running_loop(), ends))
                await ends.wait()
        except BaseException as problem:
            if not found.done():
                found.set_exception(problem)
            raise

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    url, loop, ends = found.result(60)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join()


@pytest.fixture(scope="module")
def workers(html: Path) -> list[Pictured]:  # noqa: F811
    frames = frames_of(html)
    return [Pictured(f"worker {index}", frame=frames[-1 - 3 * index]) for index in range(NUM_WORKERS)]


@pytest.fixture(scope="module")
def url(workers: list[Pictured]) -> Iterator[str]:
    with fleet(*workers) as found:
        yield f"{found}/router/ui"


@pytest.fixture
def opened(visit: Callable[..., Visit], url: str) -> Callable[..., Visit]:  # noqa: F811
    """Opens the fleet, and waits until every worker is drawn."""

    def drawn(*view: Any) -> Visit:
        found = visit(url, *view)
        for frame in found.page.frames[1:]:
            frame.wait_for_function(DRAWN)
        return found

    return drawn


def violations(page: Any) -> list[tuple[str, str, list[Any]]]:
    """What axe finds in the page and in each of its frames, taken by itself: document, rule and places.

    Not in all of them at once: workers' pages have landmarks of the same names, each within a frame of its own name.
    """
    from axe_playwright_python.sync_playwright import Axe

    options = {"resultTypes": ["violations"], "iframes": False}
    return [
        (frame.url, each["id"], [place for node in each["nodes"] for place in node["target"]])
        for frame in page.frames
        for each in Axe().run(frame, options=options).response["violations"]
    ]


def test_it_draws_every_worker_and_asks_the_router_alone(
    opened: Callable[..., Visit], url: str, workers: list[Pictured]
) -> None:
    found = opened()
    frames = found.page.frames[1:]
    assert len(frames) == NUM_WORKERS
    for frame, worker in zip(frames, workers, strict=True):
        assert frame.title().startswith(worker.name)
        assert f"{worker.frame['num_requests']} requests so far" in frame.locator("#summary").inner_text()
        assert frame.evaluate("frames.at(-1).nodes.hash") == worker.frame["nodes"]["hash"]
        assert frame.evaluate(NUM_COLORS) > 4
    pages = {f"{url}/{index}/{path}" for index in range(NUM_WORKERS) for path in PATHS}
    assert {each for each in found.requests if not each.startswith("data:")} == {url, *pages}
    assert found.complaints == []


def test_a_complaint_in_a_frame_would_be_seen(opened: Callable[..., Visit]) -> None:
    """The control of the listeners."""
    found = opened()
    found.page.frames[2].evaluate("console.error('wrong'); fetch('/router/ui/99/page')")
    # Playwright hands over what it heard while it waits.
    for _ in range(300):
        if "error: wrong" in found.complaints and any(each.endswith("/99/page") for each in found.requests):
            return
        found.page.wait_for_timeout(100)
    raise AssertionError((found.complaints, found.requests))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_axe_finds_no_violation(opened: Callable[..., Visit], scheme: str, width: int) -> None:
    page = opened(scheme, width).page
    for frame in page.frames[1:]:
        frame.locator("details summary").click()
    assert violations(page) == []
    for frame in page.frames:
        assert frame.evaluate("document.documentElement.scrollWidth <= innerWidth"), frame.url


def test_axe_would_find_one_in_the_page_and_in_a_frame(opened: Callable[..., Visit]) -> None:
    page = opened().page
    page.evaluate("document.querySelector('iframe').title = ''")
    last = page.frames[-1]
    last.evaluate("document.querySelector('label[for=query]').remove(); $('query').placeholder = ''")
    assert violations(page) == [(page.url, "frame-title", ['iframe[title=""]']), (last.url, "label", ["#query"])]


def test_every_worker_has_a_name_and_is_reached_by_the_tab_key(
    opened: Callable[..., Visit], workers: list[Pictured]
) -> None:
    page = opened().page
    for worker in workers:
        assert page.get_by_role("heading", name=worker.url).count() == 1
        assert page.locator(f'iframe[title="Prefix cache of {worker.url}"]').count() == 1
    reached = set()
    for _ in range(30 * NUM_WORKERS):
        page.keyboard.press("Tab")
        for index, frame in enumerate(page.frames[1:]):
            focused = frame.evaluate("document.hasFocus() && document.activeElement.id")
            reached.add((index, focused))
    assert {(index, name) for index in range(NUM_WORKERS) for name in ("rid", "time", "query", "tree")} <= reached
