"""The elements of a JSON array, read piece by piece, one element in memory at a time.

A malformed element is bad, and reading continues at the next one. That begins where, behind a comma or a bracket, an
object opens with one of the keys that elements open with: `{"id":`. Text cannot be taken for it, since in a JSON string
a quote has a backslash before it.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from marconi.replay.trace.base import BadRecord
from marconi.replay.trace.source import Document

PIECE_BYTES = 1 << 20
_LONGEST_TOKEN = 16
"""Characters of a JSON token, strings apart, that may be cut off at the end of a piece."""
_OVERLAP = 4096
"""Characters in which an element's beginning is found although a piece ends in it."""
_BETWEEN = re.compile(r"[ \t\r\n,]*")


class Array:
    """A document that holds an array whose elements are objects with the key `holds`."""

    def __init__(self, document: Document, first: bytes, holds: str) -> None:
        """`first` is what has been read of the document, up to the opening bracket at least."""
        self._document = document
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._text = self._decode(first)
        self._at = self._text.index("[") + 1
        self._is_read = False
        self._holds = holds
        self._first_keys = {"id", holds}
        self._begins = _beginning(self._first_keys)

    def elements(self) -> Iterator[Callable[[], Any]]:
        """A function for each element that gives it, or `BadRecord`, and is called before the next is asked for."""
        while self._next_character() != "]" or not self._is_over():
            self._is_read = False
            yield self._element
            if not self._is_read and not self._find_element():
                return

    def _more(self) -> bool:
        piece = self._document.read(max(PIECE_BYTES, len(self._text) - self._at))
        self._text = self._text[self._at :] + self._decode(piece)
        self._at = 0
        return bool(piece)

    def _next_character(self) -> str:
        while True:
            match = _BETWEEN.match(self._text, self._at)
            assert match is not None, "the pattern matches nothing, too"
            self._at = match.end()
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _is_over(self) -> bool:
        while not self._text[self._at + 1 :].strip():
            if not self._more():
                return True
        return False

    def _element(self) -> Any:
        if self._text.startswith("]", self._at):
            raise BadRecord("not JSON (the list has ended before it): cut off or malformed")
        decoder = json.JSONDecoder()
        while True:
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                begun = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _LONGEST_TOKEN
                if begun and self._more():
                    continue
                what = error.msg.removesuffix(" at")
                raise BadRecord(f"not JSON (character {error.pos - self._at}: {what}): cut off or malformed") from None
            except (ValueError, RecursionError) as error:
                raise BadRecord(f"not JSON ({error})") from None
            if end == len(self._text) and not isinstance(value, dict | list | str) and self._more():
                continue  # a number may go on
            self._at, self._is_read = end, True
            if isinstance(value, dict) and self._holds in value and next(iter(value)) not in self._first_keys:
                self._first_keys.add(next(iter(value)))
                self._begins = _beginning(self._first_keys)
            return value

    def _find_element(self) -> bool:
        """Goes to the beginning of the next element, if there is one."""
        while (match := self._begins.search(self._text, self._at)) is None:
            self._at = max(self._at, len(self._text) - _OVERLAP)
            if not self._more():
                return False
        self._at = match.start(1)
        return True


def _beginning(first_keys: Iterable[str]) -> re.Pattern[str]:
    keys = "|".join(re.escape(json.dumps(key)) for key in sorted(first_keys))
    return re.compile(rf"[,\]}}]\s*(\{{\s*(?:{keys})\s*:)")
