"""A scheduler's work on a request, step by step, so that a replay can do the same in the same order.

    queued, unqueued    it waited, as far as the cache follows the queue
    rematched           while it waited, another state was found for it to resume from
    tried               it was matched, and no slot was free for a copy of that state
    matched             the same, with or without a free slot: the last time, when it was taken into a prefill
    began               that prefill was planned
    chunks              each: memory was about to be taken for it, and what it left joined the tree
    ended               its last state joined the tree

and what came with it that a plan depends on: the positions that it named, and how far before its end its template's
next turn leaves it.

The cache's time stands still between two ticks (`cache/tick.py`), within which many steps are done: moments are
numbered. Each step of decoding takes memory for all requests that have been prefilled and not ended, and only the
number of steps is reported, with each moment.

Owner: the scheduler's thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import msgspec


class Moment(NamedTuple):
    """A point in the work of one scheduler."""

    number: int
    """Those of a cache, in order."""
    at_s: float
    """Seconds of the cache's clock."""
    num_decodes: int = 0
    """Steps of decoding that had begun."""


class Moments:
    """Numbers the moments of one cache."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num = self._num_decodes = 0

    def now(self) -> Moment:
        """The next moment."""
        self._num += 1
        return Moment(self._num, self._clock(), self._num_decodes)

    def decodes(self) -> None:
        """A step of decoding begins."""
        self._num_decodes += 1


@dataclass(slots=True)
class Chunk:
    """A part of a prompt that was computed at once."""

    end: int
    """Tokens of the prompt up to its last."""
    taken: Moment
    left: Moment | None = None


@dataclass(slots=True)
class Steps:
    """The steps of one request, as far as it has come."""

    queued: Moment | None = None
    unqueued: Moment | None = None
    rematched: list[Moment] = field(default_factory=list)
    tried: list[Moment] = field(default_factory=list)
    matched: Moment | None = None
    began: Moment | None = None
    chunks: list[Chunk] = field(default_factory=list)
    ended: Moment | None = None
    asked: tuple[int, ...] = ()
    """Positions in the prompt, in tokens, after which it asked for a state."""
    elsewhere: tuple[int, ...] = ()
    """Positions, in tokens, at which prompts on other servers diverge from it, as its router named them."""
    next_turn: int | None = None
    """Tokens before the prompt's end; None where it is not known."""
    system_end: int = 0
    """Where the system prompt of a chat ends, in tokens; 0 where that is not known."""

    def computes(self, end: int, now: Moment) -> None:
        """Memory is about to be taken for the prompt up to `end`."""
        self.chunks.append(Chunk(end, now))

    def computed(self, now: Moment) -> None:
        """The states of the last chunk join the tree."""
        if self.chunks and self.chunks[-1].left is None:
            self.chunks[-1].left = now

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Steps":
        """Read what `as_dict` gave, of a request that has ended; `ValueError` otherwise."""
        steps = msgspec.convert(values, cls)
        if not {each.name for each in fields(cls)} <= values.keys():
            raise ValueError("these are the steps of another version")
        if steps.began is None or steps.ended is None or any(each.left is None for each in steps.chunks):
            raise ValueError("the request has not ended")
        return steps

    def as_dict(self) -> dict[str, Any]:
        """The values for JSON; a moment is its number, its time and the steps of decoding."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values
