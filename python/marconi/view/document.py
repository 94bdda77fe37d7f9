"""The page as one file: its markup, style and scripts inlined, and frames embedded, or the address that has them.

The page fetches nothing but, where its body names their URLs, the latest requests, each with its explanation and the
hash of its prefix (`data-requests`), the latest frame (`frame.py`, `data-source`), and the last hour (`data-history`).

How the page draws each cause comes with it, from the table (`policy/causes.py`), under the words of its frames:

    {"evicted for kv": {"color": "#bf3c1b", "cure": "another division", "angle": 45, "gap": 3}, ...}

The lines of its hatching lie at `angle` degrees, one for each cure, `gap` pixels apart, one for each place in the cure.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Final

from marconi.page.inlined import inlined
from marconi.policy.causes import Cause, Cure
from marconi.view.frame import Frame, encoded

SCRIPTS: Final = ("layout.js", "tree.js", "requests.js", "history.js", "page.js")
"""In the order in which they are run, after those of all pages."""
# Upright lines are lost between narrow bars: they are left to what nobody can change.
_ANGLES: Final = dict(zip(Cure, (0, 45, 135, 90), strict=True))


@dataclass(frozen=True, slots=True)
class PageSource:
    """A live page's server; addresses are relative to the page's."""

    frame: str
    """Has the latest frame."""
    requests: str
    """Has the latest requests (`GET /marconi/requests`)."""
    history: str = ""
    """Has the last hour in small figures (`GET /marconi/ui/history`); empty for none."""
    interval_s: float = 1.0
    """From frame to frame."""

    @property
    def attributes(self) -> str:
        """Attributes of the page's body."""
        values = {"source": self.frame, "requests": self.requests, "interval-s": f"{self.interval_s:g}"}
        if self.history:
            values["history"] = self.history
        return "".join(f' data-{name}="{escape(value)}"' for name, value in values.items())


def document(title: str, frames: Sequence[Frame] = (), source: PageSource | None = None) -> str:
    """The page of `frames`, or of those that `source` gives."""
    return inlined(
        files("marconi.view").joinpath("page"),
        "index.html",
        SCRIPTS,
        title=escape(title),
        source="" if source is None else source.attributes,
        # A text in JSON must not end the element that it is in.
        frames=encoded(frames).decode().replace("<", "\\u003c"),
        causes=json.dumps(hatchings()),
    )


def hatchings() -> dict[str, dict[str, str | int]]:
    """How each cause is drawn, in the order of the table."""
    return {
        cause.words: {"color": cause.color, "cure": cure.value, "angle": angle, "gap": 3 + 2 * place}
        for cure, angle in _ANGLES.items()
        for place, cause in enumerate(cause for cause in Cause if cause.cure is cure)
    }
