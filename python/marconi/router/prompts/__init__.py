"""From a request's JSON body to the token ids that its worker makes of it; this file is the contract.

    body --PromptReader.read--> ids         exactly the worker's, or
                                question    the body of a `POST /v1/tokenize` that a worker answers with them, or
                                neither     they cannot be known: images, sessions, unknown adapters

A body is read, never refused: its worker refuses what it does not take. No id is a guess.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol, Self

GENERATE: Final = "/generate"
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
ROUTES: Final = (GENERATE, COMPLETIONS, CHAT, MESSAGES)


class PromptKind(StrEnum):
    """A kind of prompts that workers tokenize as this router does, or not."""

    TEXTS = "texts"
    CHATS = "chats"
    PARTS = "chats in parts"
    THINKING = "chats that switch thinking"
    TOOLS = "chats with tools"
    CALLS = "chats with calls and results"


class Unknowable(Exception):
    """A prompt whose ids cannot be known before its worker serves it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The prompt that was read from a body."""

    ids: Sequence[int] | None
    """The prompt's, at least one; of a batch, those of its longest prompt, which has most to gain from a hit."""
    extra_key: str | None
    """The namespace in the worker's tree, an adapter's id included."""
    cache_salt: str | None
    is_stream: bool
    question: Mapping[str, Any] | None = None
    """Without ids: the body of a `POST /v1/tokenize` that is answered with them."""


class PromptReader(Protocol):
    """Reads the bodies of the routes that it knows; one object for all threads."""

    def read(self, route: str, body: Mapping[str, Any]) -> Reading:
        """Read a body that was posted to `route`."""

    def for_workers(self, kinds: Set[PromptKind], model: str | None = None) -> Self:
        """The same reader for workers that tokenize prompts of these kinds alike, and serve a model by this name."""
