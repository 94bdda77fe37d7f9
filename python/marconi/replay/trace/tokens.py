"""Tokens of a text: with a Hugging Face `tokenizer.json`, or a default that needs nothing.

The default cuts a text as byte-pair tokenizers do before they merge: a word or a sign with the one space before it, or
a run of white space, words in pieces of at most eight characters. Pieces are numbered in the order of their first use.
Equal texts give equal ids, and a text that goes on keeps all but its last one or two.
"""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marconi.replay.trace.identity import DenseIds

Tokenizer = Callable[[str], list[int]]

_PIECE = re.compile(r" ?[^\W_]{1,8}| ?[^\w\s]| ?_+|\s+")


def tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of the file at `path`, or the default one; `ValueError` if it cannot be loaded."""
    return _words() if path is None else _hugging_face(path)


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
