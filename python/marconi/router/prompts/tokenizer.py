"""A worker's tokenizer: text to ids, without transformers.

    tokenizer.json --the class's pipeline (`pipeline`)--> --tokens of the configuration (`special`)--> encode

A chat is encoded without the special tokens that a tokenizer puts around a text, since its template has them; a plain
text is encoded with them. Nothing is truncated or padded. Other threads run while a text is encoded.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from tokenizers import Tokenizer

from marconi.router.prompts.base import Unreadable
from marconi.router.prompts.files import ModelFolder
from marconi.router.prompts.pipeline import built, class_of
from marconi.router.prompts.special import special_tokens


@dataclass(frozen=True, slots=True)
class TextTokenizer:
    """Of one model."""

    _pipeline: Tokenizer
    special: Mapping[str, str]
    """The text of each named token, as templates see it."""
    adds_special: bool
    """It puts tokens around a text."""

    @classmethod
    def of(cls, folder: ModelFolder) -> Self:
        """The tokenizer that a worker makes of a folder; `ValueError` with one line where that is not known here."""
        rebuilt = class_of(folder)
        pipeline = built(folder, rebuilt)
        tokens = special_tokens(folder, {} if rebuilt is None else rebuilt.names)
        tokens.add_to(pipeline)
        if rebuilt is not None and rebuilt.renews_special:
            tokens.renew(pipeline)
        pipeline.no_truncation()
        pipeline.no_padding()
        pipeline.encode_special_tokens = bool(folder.json("tokenizer_config.json").get("split_special_tokens"))
        return cls(pipeline, tokens.texts, len(pipeline.encode("").ids) > 0)

    @property
    def added_texts(self) -> list[str]:
        """Of the tokens that are found in a text before it is cut into words."""
        return [token.content for token in self._pipeline.get_added_tokens_decoder().values()]

    def encode(self, text: str) -> "array[int]":
        """Of a plain text."""
        return self._encode(text, True)

    def encode_chat(self, text: str) -> "array[int]":
        """Of a rendered chat."""
        return self._encode(text, False)

    def encode_continuation(self, text: str) -> "array[int]":
        """Of the beginning of an answer, which follows a chat."""
        ids = self._encode(text, True)
        begin = self.special.get("bos_token")
        if begin is not None and ids and ids[0] == self._pipeline.token_to_id(begin):
            del ids[0]
        return ids

    def _encode(self, text: str, adds_special: bool) -> "array[int]":
        try:
            # Unlike `encode`, it lets other threads run, and it leaves out the offsets, which nobody reads.
            (encoding,) = self._pipeline.encode_batch_fast([text], add_special_tokens=adds_special)
            return array("q", encoding.ids)
        except (UnicodeError, TypeError):  # It takes no lone surrogates.
            raise Unreadable("a text with half of a surrogate pair; Unicode text is right") from None
