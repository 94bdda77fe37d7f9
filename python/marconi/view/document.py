"""The page as one file: its markup, style and scripts inlined, and frames embedded, or the address that has them.

The page fetches nothing but, where `data-source` of its body names a URL, the latest frame (`frame.py`) from there.
"""

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Final

from marconi.view.frame import Frame, encoded

SCRIPTS: Final = ("layout.js", "tree.js", "charts.js", "page.js")
"""In the order in which they are run."""


def document(title: str, frames: Sequence[Frame] = (), source: str | None = None, interval_s: float = 1.0) -> str:
    """The page of `frames`, or one that asks `source` for the latest frame every `interval_s` seconds."""
    live = "" if source is None else f' data-source="{escape(source)}" data-interval-s="{interval_s:g}"'
    pieces = {
        "title": escape(title),
        "source": live,
        "style": _text("style.css"),
        # A text in JSON must not end the element that it is in.
        "frames": encoded(frames).decode().replace("<", "\\u003c"),
        "scripts": "\n".join(map(_text, SCRIPTS)),
    }
    return re.sub(r"\{\{([a-z]+)\}\}", lambda match: pieces[match[1]], _text("index.html"))


def _text(name: str) -> str:
    return files("marconi.view").joinpath("page", name).read_text(encoding="utf-8")
