"""What a router reads off a request, without a model.

    body --PromptReader.read--> ids, the name space they live in, and how it is answered

The ids are those that a worker makes of the same body: a reader either has them exactly or says that it has none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Unreadable(ValueError):
    """A body is not what its route takes. One line, for the client: 400."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a body asks for."""

    ids: Sequence[int] | None
    """Of the prompt, of a batch's first one; None where a router cannot know them. Routed all the same."""
    extra_key: str | None
    """As the worker's tree names the space, as far as a body tells it."""
    cache_salt: str | None
    is_stream: bool
    num_prompts: int
    """Of a batch; 1 otherwise."""


class PromptReader(Protocol):
    """Reads the bodies of the routes it knows; one object for all threads."""

    def read(self, route: str, body: Mapping[str, Any]) -> Reading:
        """Of a body that was posted to `route`; `Unreadable` for one that is not what the route takes."""
