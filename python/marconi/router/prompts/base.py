"""What a router reads off a request, without a model.

    body --PromptReader.read--> ids         exactly the worker's, or
                                question    what a worker's own tokenizer is asked for them, or
                                neither     nobody can know them: images, sessions, unknown adapters

A body is read, never refused: what a worker would not take, it refuses itself. No id is a guess.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol, Self

GENERATE: Final = "/generate"
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"


class Kind(StrEnum):
    """What a prompt is made from."""

    TEXTS = "texts"
    CHATS = "chats"


class Unknown(Exception):
    """A prompt's ids are not known here; a worker's own tokenizer knows them."""


class Unknowable(Exception):
    """A prompt's ids are known to nobody before its worker serves it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a body asks for."""

    ids: Sequence[int] | None
    """The prompt's, at least one; of a batch, those of its longest prompt, which has most to gain from a hit."""
    extra_key: str | None
    """As the worker's tree names the space; an adapter's id is part of it."""
    cache_salt: str | None
    is_stream: bool
    question: Mapping[str, Any] | None = None
    """Without ids: the body of a `POST /v1/tokenize` that is answered with them."""


class PromptReader(Protocol):
    """Reads the bodies of the routes it knows; one object for all threads."""

    def read(self, route: str, body: Mapping[str, Any]) -> Reading:
        """Read a body that was posted to `route`."""

    def only(self, kinds: Set[Kind]) -> Self:
        """The same reader, with questions for prompts of other kinds than these."""
