"""Requests that share prefixes in every way that servers see, of random lengths, from one seed.

Each begins anew (half of them behind a shared prefix) or takes up one of the last few dozen, running or done: all of it
and more, a branch from anywhere in it, the same prompt again, or the same tokens in another name space. Tokens are of
a few kinds, so prefixes are shared by chance too. What a request will answer is known when it is made.

Times of long requests, when KV is short, take turns with times of short ones, when states are.
"""

import random
from array import array
from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum

STOP = 3
"""The token that ends an answer early; new tokens are smaller."""
NAMESPACES = ((None, None), (None, None), ("adapter", None), (None, "tenant"), ("adapter", "tenant"))
"""`extra_key` and `cache_salt`."""
_NUM_REMEMBERED = 48
_TURN_EVERY_REQUESTS = 40
"""When another time begins,"""
_PARTS = (1.0, 0.1, 1.0, 0.3)
"""whose longest request takes this part of the longest of all."""


class Origin(StrEnum):
    """Where a request comes from."""

    NEW = "new"
    EXTENSION = "extension"
    FORK = "fork"
    REPEAT = "repeat"
    STRANGER = "stranger"
    """The tokens of another in another name space."""


@dataclass(frozen=True, slots=True)
class Script:
    """A request and its answer."""

    origin: Origin
    prompt: "array[int]"
    answer: "array[int]"
    """The last token is `STOP`, or there are `max_new_tokens`."""
    max_new_tokens: int
    namespace: tuple[str | None, str | None]
    """`extra_key` and `cache_salt`."""

    @property
    def sequence(self) -> "array[int]":
        """Prompt and answer."""
        return self.prompt + self.answer


class Workload:
    """Makes requests whose prompt and answer, at its longest, take at most `max_tokens`."""

    def __init__(self, rng: random.Random, max_tokens: int) -> None:
        self._rng = rng
        self._longest = self._max_tokens = max_tokens
        self._num_made = 0
        self._known: deque[Script] = deque(maxlen=_NUM_REMEMBERED)
        self._shared = [self._tokens(rng.randint(1, max_tokens // 3)) for _ in range(3)]

    def next(self) -> Script:
        """Another request."""
        rng = self._rng
        part = _PARTS[self._num_made // _TURN_EVERY_REQUESTS % len(_PARTS)]
        self._max_tokens = max(int(self._longest * part), 2)
        self._num_made += 1
        script = self._new() if not self._known or rng.random() < 0.25 else self._taken_up(rng.choice(self._known))
        self._known.append(script)
        return script

    def _new(self) -> Script:
        shared = self._rng.choice(self._shared) if self._rng.random() < 0.5 else array("q")
        prompt = shared + self._tokens(self._length(max(self._max_tokens // 3, 1)))
        return self._script(Origin.NEW, prompt, self._rng.choice(NAMESPACES))

    def _taken_up(self, known: Script) -> Script:
        rng, sequence = self._rng, known.sequence
        origin = rng.choice((Origin.EXTENSION, Origin.EXTENSION, Origin.FORK, Origin.FORK, Origin.REPEAT))
        if origin is Origin.REPEAT and rng.random() < 0.2:
            origin = Origin.STRANGER
        if origin is Origin.REPEAT and len(sequence) <= self._max_tokens and rng.random() < 0.5:
            return replace(known, origin=origin)
        if origin is Origin.EXTENSION:
            prompt = sequence + self._tokens(self._length(60))
        elif origin is Origin.FORK:
            prompt = sequence[: rng.randint(1, len(sequence))] + self._tokens(self._length(60))
        else:
            prompt = known.prompt
        if origin is Origin.STRANGER:
            return self._script(origin, prompt, rng.choice([each for each in NAMESPACES if each != known.namespace]))
        return self._script(origin, prompt, known.namespace)

    def _script(self, origin: Origin, prompt: "array[int]", namespace: tuple[str | None, str | None]) -> Script:
        rng = self._rng
        prompt = prompt[: self._max_tokens - 1]
        most = self._max_tokens - len(prompt)
        max_new_tokens = 1 if rng.random() < 0.1 else rng.randint(1, most)
        stops = rng.random() < 0.4
        num_tokens = rng.randint(1, max_new_tokens) - 1 if stops else max_new_tokens
        answer = self._tokens(num_tokens) + array("q", [STOP] * stops)
        return Script(origin, prompt, answer, max_new_tokens, namespace)

    def _tokens(self, num_tokens: int) -> "array[int]":
        return array("q", self._rng.choices(range(STOP), k=num_tokens))

    def _length(self, most: int) -> int:
        """From 1 to `most`, half of the time of the shorter quarter."""
        return self._rng.randint(1, max(most // 4, 1) if self._rng.random() < 0.5 else most)
