"""Chromium, what a page asks for and complains of while it is open, and the page of a small replay."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from marconi.cli import main

if TYPE_CHECKING:
    from playwright.sync_api import Page

ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
TRACE = ("generate:chat-short", "--max-sessions", "8", "--model", "nemotron-h-8b")


@pytest.fixture(scope="session")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of 12 frames, with evictions and ghosts."""
    path = tmp_path_factory.mktemp("view") / "page.html"
    assert main(["view", *TRACE, "--memory", "2GB", "--frames", "12", "--html", str(path)]) == 0
    return path


def frames_of(html: Path) -> list[dict[str, Any]]:
    _, _, rest = html.read_text(encoding="utf-8").partition('<script type="application/json" id="frames">')
    frames: list[dict[str, Any]] = json.loads(rest.partition("</script>")[0])["frames"]
    return frames


class Visit:
    """A page that is open, and what it asked for and complained of meanwhile."""

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def text(self, name: str) -> str:
        return self.page.locator(f"#{name}").inner_text()

    @property
    def step(self) -> int:
        return int(self.page.locator("#time").input_value())

    @property
    def view(self) -> tuple[float, float, float, float]:
        """The part of the tree's plane that is shown."""
        return tuple(self.page.evaluate("[view.x0, view.x1, view.y0, view.y1]"))


@pytest.fixture(scope="module")
def visit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Visit]]:
    """Opens an address in a colour scheme and a width, one page at a time.

    Not for longer than a file: while it is there an event loop runs in this thread, and tests of others run their own.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path_factory.mktemp("chromium")), executable_path="/usr/bin/chromium", args=ARGUMENTS
        )

        def opened(url: str, scheme: str = "light", width: int = 1400) -> Visit:
            for page in context.pages[1:]:
                page.close()
            page = context.new_page()
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            page.set_viewport_size({"width": width, "height": 900})
            found = Visit(page)
            page.goto(url)
            return found

        yield opened
        context.close()
