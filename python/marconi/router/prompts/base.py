"""What a router reads off a request, without a model.

    body --PromptReader.read--> ids, the name space they live in, and how it is answered

Of a body there are three kinds: its ids are known, exactly as the worker will have them; its ids cannot be known here
(`Unknowable`: `Reading.ids` is None, it is routed all the same); its worker would refuse it (`Unreadable`). What a
worker takes is never refused, and ids are never a guess.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Unreadable(ValueError):
    """A body is not what its route takes. One line, for the client: 400."""


class Unknowable(Exception):
    """A body's ids depend on what a router does not have. Says on what; never leaves a `PromptReader`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a body asks for."""

    ids: Sequence[int] | None
    """Of the prompt, at least one; of a batch, of its longest prompt, which has most to gain from a hit. None where a
    router cannot know them."""
    extra_key: str | None
    """As the worker's tree names the space; None, and no ids, for an adapter that a router was not told of."""
    cache_salt: str | None
    is_stream: bool
    num_prompts: int
    """Of a batch; 1 otherwise."""


class PromptReader(Protocol):
    """Reads the bodies of the routes it knows; one object for all threads."""

    def read(self, route: str, body: Mapping[str, Any]) -> Reading:
        """Of a body that was posted to `route`; `Unreadable` for one that is not what the route takes."""
