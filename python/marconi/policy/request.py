"""Requests: their tokens as packed ids, a trace of them, and a request with its match when it comes.

A *unit* is what a trace names: one token (`unit_tokens` 1) or one block of tokens. Ids are packed as four-byte
little-endian unsigned integers, so that comparing two prefixes is comparing bytes. In a block trace the last block of
a prompt may be partial: it is part of `path`, for block caches, but a state cannot be placed at its unknown end, so it
is beyond `num_known_tokens`.
"""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from marconi.tree import Match


def pack(ids: Iterable[int]) -> bytes:
    """`ids` as a path; `OverflowError` for an id outside 0 .. 2**32 - 1, `TypeError` for one that is no integer."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack(path: bytes) -> list[int]:
    """The ids of a path."""
    ids: list[int] = np.frombuffer(path, dtype="<u4").tolist()
    return ids


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its sequence, its lengths and when it came."""

    path: bytes
    """Packed ids of the prompt's units, followed by the output's where they are known."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_known_tokens: int
    """Tokens at the front of `path` that are known in whole units."""
    arrival_s: float
    """Seconds from the start of the trace."""
    session: int = -1
    """The conversation, numbered from 0; -1 where a trace does not say."""
    turn: int = 0
    """Position in the session, from 0."""
    namespace: int = 0
    """Prefixes are shared within a namespace only."""

    @property
    def num_processed_tokens(self) -> int:
        """Tokens that pass through the model: all but the last sampled one."""
        return self.num_prompt_tokens + max(self.num_output_tokens, 1) - 1

    def known_for(self, num_known_tokens: int, num_output_tokens: int | None = None) -> "Request":
        """The same request with `num_known_tokens` known, and `num_output_tokens` of its answer; None for all."""
        return Request(
            self.path,
            self.num_prompt_tokens,
            self.num_output_tokens if num_output_tokens is None else num_output_tokens,
            num_known_tokens,
            self.arrival_s,
            self.session,
            self.turn,
            self.namespace,
        )

    def last_known_depth(self, grid_tokens: int) -> int:
        """The deepest multiple of `grid_tokens` that is processed and whose tokens are known."""
        return min(self.num_processed_tokens, self.num_known_tokens) // grid_tokens * grid_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    unit_tokens: int
    """Tokens a unit: 1 for token ids, else the block size."""
    requests: tuple[Request, ...]


class Lease(NamedTuple):
    """A request, and what the tree knew of it when it came."""

    request: Request
    match: Match
