"""Token ids of chats that share messages: each text between a tokenizer's markers is encoded once.

A tokenizer finds its added tokens in a text first, then encodes each part between them by itself. A rendered chat may
therefore be cut before an added token, `<|im_start|>` for example, and the pieces have the ids of the whole, if that
token

    is found in the raw text         not in a normalised one, and not only as a word of its own
    begins where its text begins     it takes no white space before it along
    cannot be missed                 no added token, itself among them, contains it or ends in its beginning

Such a token is a *marker*. Texts are cut before those that a chat's template names, or encoded whole without one.
"""

import re
from array import array
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from tokenizers import AddedToken, Tokenizer

from marconi.chat.tokenizer import TextTokenizer

MAX_PIECES: Final = 1 << 14
"""Pieces whose ids are kept: some thousand chats at once."""


class Pieces:
    """Encodes chats that `template` renders, without the tokens that a tokenizer adds around a text."""

    def __init__(self, tokenizer: TextTokenizer, template: str) -> None:
        self._encode = tokenizer.encode
        pipeline = tokenizer.pipeline
        found = [] if pipeline is None else [marker for marker in markers(pipeline) if marker in template]
        self._markers = re.compile(f"({'|'.join(map(re.escape, found))})") if found else None
        self._ids = lru_cache(MAX_PIECES)(self._encoded)

    def encode(self, text: str) -> "array[int]":
        """Encode a text; the ids have four bytes each."""
        if self._markers is None or not text:
            return self._encoded(text)
        first, *rest = self._markers.split(text)
        ids = self._ids(first)[:] if first else array("I")
        for marker, after in zip(rest[::2], rest[1::2], strict=True):
            ids += self._ids(marker + after)
        return ids

    def _encoded(self, text: str) -> "array[int]":
        return array("I", self._encode(text, adds_special=False))


def markers(pipeline: Tokenizer) -> tuple[str, ...]:
    """Added tokens before which any text may be cut."""
    added = list(pipeline.get_added_tokens_decoder().values())
    texts = [token.content for token in added]
    return tuple(
        token.content for token in added if _is_found(token, pipeline) and not _is_hidden(token.content, texts)
    )


def _is_found(token: AddedToken, pipeline: Tokenizer) -> bool:
    is_read = not (token.special and pipeline.encode_special_tokens)
    return is_read and not (token.normalized or token.single_word or token.lstrip or token.content[:1].isspace())


def _is_hidden(marker: str, texts: Iterable[str]) -> bool:
    others = [text for text in texts if text != marker]
    overlaps = any(text.endswith(marker[:size]) for text in (*others, marker) for size in range(1, len(marker)))
    return not marker or overlaps or any(marker in text for text in others)
