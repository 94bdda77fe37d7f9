"""A page as one file: its markup, with all styles and scripts inlined, so that it fetches none.

    {{style}}, {{scripts}}    `style.css` and `charts.js`, which all pages share, then the page's own
    {{name}}                  the page's piece of that name

Markup holds, besides, an element `causes` with what `charts.js` draws by the names of causes: `{}` where it draws none.
"""

import re
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

_SHARED: Final = files("marconi.page")


def inlined(folder: Traversable, markup: str, scripts: Sequence[str], styles: Sequence[str] = (), **pieces: str) -> str:
    """The page of the file `markup` in `folder`, with the files of its own scripts and styles, in their order."""
    shared = {"style": _text(_SHARED, ["style.css"]), "scripts": _text(_SHARED, ["charts.js"])}
    own = {"style": _text(folder, styles), "scripts": _text(folder, scripts)}
    known = {**pieces, **{name: f"{text}\n{own[name]}" for name, text in shared.items()}}
    return re.sub(r"\{\{([a-z]+)\}\}", lambda match: known[match[1]], _text(folder, [markup]))


def _text(folder: Traversable, names: Sequence[str]) -> str:
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)
