"""A shape of traffic as a program of its clients, whoever answers: a server, the host's rig or a test.

A program yields waves of requests and is sent their answers: what is in a wave is asked at once, and a wave comes when
the one before it is answered.
"""

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum

from .text import Message


class Way(Enum):
    """How a wave reaches a server."""

    IDS = "ids"
    """`/generate` with token ids; several as one body, so that they arrive together and in order."""
    CHAT = "chat"
    """`/v1/chat/completions`, one after the other."""
    FORK = "fork"
    """Branches of a program in SGLang's frontend."""
    SYNCED_FORK = "synced fork"
    """The same with `s.sync()` before them, so that the frontend asks for their common prefix first."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request."""

    prompt: tuple[int, ...]
    num_output_tokens: int
    num_samples: int = 1
    """`n`: so many answers. SGLang computes the prompt once before it samples them."""
    messages: tuple[Message, ...] = ()
    """What a chat sends in place of the ids, which are what its template makes of them."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that are asked at once."""

    asks: tuple[Ask, ...]
    way: Way = Way.IDS
    num_shared_tokens: int = 0
    """Of a fork: the tokens of its context."""

    @property
    def context(self) -> Ask:
        """Of a fork, what its frontend commits."""
        return Ask(self.asks[0].prompt[: self.num_shared_tokens], 0)


Program = Generator[Wave, Sequence[Sequence[int]], None]
"""Is sent the answer to each request of a wave as token ids; of several samples the first."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How many and how long, in shares of what a shape has by itself."""

    number: float = 1.0
    turns: float = 1.0
    length: float = 1.0

    def times(self, number: int) -> int:
        """So many of a thing, at least two."""
        return max(2, round(self.number * number))

    def rounds(self, number: int) -> int:
        """So many turns, at least two."""
        return max(2, round(self.turns * number))

    def tokens(self, number: int) -> int:
        """So many tokens."""
        return max(8, round(self.length * number))

    def about(self, rng: random.Random, number: int) -> int:
        """So many tokens, a fifth more or less: no grid fits all."""
        return rng.randint(self.tokens(number * 4 // 5), self.tokens(number * 6 // 5))


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of traffic."""

    name: str
    what: str
    """In a few words."""
    write: Callable[[random.Random, Scale], Program]

    def program(self, scale: Scale) -> Program:
        """Its program; the same for the same scale."""
        return self.write(random.Random(self.name), scale)  # noqa: S311 - a workload, not a secret
