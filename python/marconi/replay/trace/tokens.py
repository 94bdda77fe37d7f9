"""Tokens of a text: with a Hugging Face `tokenizer.json`, a model's tokenizer, or a default that needs nothing.

The default estimates from bytes, about four a token as byte-pair tokenizers have them: a text is cut as they do before
they merge, into words or signs with the one space before them and runs of white space; one of at most eight bytes is a
token, a longer one has a token for every four. Pieces are numbered in the order of their first use. Equal texts give
equal ids, and a text that is continued keeps all but those of its last word.
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
_PIECE = re.compile(r" ?[^\W_]+| ?[^\w\s]+| ?_+|\s+")
_WHOLE_BYTES = 8
"""A word of at most so many bytes is one token."""
_TOKEN_BYTES = 4
ESTIMATED = (
    "no tokenizer is given: tokens are estimated from bytes, about four a token, and all figures are approximate"
)


def tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of the file, folder or hub name `path`, or the default one; `ValueError` if it cannot be loaded."""
    if path is None:
        return _estimate()
    return _hugging_face(path) if is_file(path) else _model_tokens(loaded(path))


def is_file(path: Path) -> bool:
    """True for a `tokenizer.json`, present or not, false for a folder or a hub name."""
    return path.is_file() or path.suffix == ".json"


def _estimate() -> Tokenizer:
    numbers = DenseIds()

    def tokens(text: str) -> list[int]:
        words = (word.encode(errors="surrogatepass") for word in _PIECE.findall(text))
        return [numbers[piece] for word in words for piece in _pieces(word)]

    return tokens


def _pieces(word: bytes) -> list[bytes]:
    if len(word) <= _WHOLE_BYTES:
        return [word]
    return [word[at : at + _TOKEN_BYTES] for at in range(0, len(word), _TOKEN_BYTES)]


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
