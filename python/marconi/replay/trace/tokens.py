"""Tokens of a text: with a Hugging Face `tokenizer.json`, a model's tokenizer, or a default that needs nothing.

The default cuts a text as byte-pair tokenizers do before they merge: a word or a sign with the one space before it, or
a run of white space, words in pieces of at most eight characters. Pieces are numbered in the order of their first use.
Equal texts give equal ids, and a text that is continued keeps all but its last one or two.
"""

import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marconi.replay.trace.identity import DenseIds

if TYPE_CHECKING:
    from marconi.chat.tokenizer import TextTokenizer

Tokenizer = Callable[[str], list[int]]

_EXTRA = "pip install '.[router]' in its checkout"
_PIECE = re.compile(r" ?[^\W_]{1,8}| ?[^\w\s]| ?_+|\s+")


def tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of the file, folder or hub name `path`, or the default one; `ValueError` if it cannot be loaded."""
    if path is None:
        return _words()
    return _hugging_face(path) if is_file(path) else _model_tokens(loaded(path))


def is_file(path: Path) -> bool:
    """True for a `tokenizer.json`, present or not, false for a folder or a hub name."""
    return path.is_file() or path.suffix == ".json"


def _words() -> Tokenizer:
    numbers = DenseIds()

    def tokens(text: str) -> list[int]:
        return [numbers[piece] for piece in _PIECE.findall(text)]

    return tokens


def _hugging_face(path: Path) -> Tokenizer:
    try:
        library: Any = importlib.import_module("tokenizers")
    except ImportError:
        raise ValueError(f"{path}: a tokenizer file needs the package tokenizers, which is not installed") from None
    try:
        loaded = library.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{path}: not a tokenizer file: {error}") from None

    def tokens(text: str) -> list[int]:
        found: list[int] = loaded.encode(text, add_special_tokens=False).ids
        return found

    return tokens


def _model_tokens(loaded: "TextTokenizer") -> Tokenizer:
    def tokens(text: str) -> list[int]:
        return list(loaded.encode(text, adds_special=False))

    return tokens


def loaded(name: Path) -> "TextTokenizer":
    """The tokenizer of a folder or of a hub name; `ValueError`, in one line, where it cannot be loaded."""
    try:
        from marconi.chat.folder import folder_of
        from marconi.chat.tokenizer import TextTokenizer
    except ImportError as absent:
        raise ValueError(_absent(name, absent.name)) from None
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(_absent(name, "transformers"))
    return TextTokenizer.load(folder_of(str(name), "--tokenizer"))


def _absent(name: Path, package: str | None) -> str:
    return f"{name}: a model's tokenizer needs {package}, which is not installed: {_EXTRA}"
