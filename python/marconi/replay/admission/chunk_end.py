"""Admission as in SGLang 0.5.23: one state a forward of prefill, and the last one of decoding.

Prefill runs in chunks of at most `chunk_tokens`, each a forward that keeps at most one state, which is inserted before
the next chunk starts (`managers/schedule_batch.py`, `mem_cache/unified_radix_cache.py`). With `--mamba-radix-cache-
strategy extra_buffer` (`ExtraBuffer`):

- a forward over the tokens from p to e keeps the state at p + floor((e - p) / grid) * grid, counted from its own
  start, if that is beyond p (`_mamba_radix_cache_v2_req_prepare_for_extend`);
- the branch point, the longest prefix whose KV is held rounded down to the grid, displaces it in the forward that
  reaches past it, if it lies on the grid as counted from p (`mem_cache/unified_cache/components/mamba.py`). Ghosts
  are not consulted: upstream remembers no prefix whose KV was evicted;
- decoding writes the state at every multiple of lcm(interval, grid) tokens, alternating between two slots, and the
  request inserts only the last of them at its end;
- a request that ends with its prefill (one output token) leaves the states of its chunks like any other.

With `no_buffer` (`NoBuffer`) the states stand at the exact end of each chunk and of the request, none at a branch.
That of the request's last chunk, at the end of the prompt, serves no repeat of it: the last token is recomputed.

A chunk is as long as the batch leaves room for, so `chunk_tokens` is that of a request that runs alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from marconi.policy.request import Request
from marconi.tree import Match

DEFAULT_CHUNK_TOKENS = 8192
"""`--chunked-prefill-size` that SGLang chooses on a GPU of 60 to 90 GB."""


@dataclass(frozen=True, slots=True)
class ExtraBuffer:
    """`extra_buffer`: the chunk grid, the branch point in place of an end, and the last state of decoding.

    On a block trace the grid and the chunk are multiples of its unit, which coarsens what upstream does.
    """

    grid_tokens: int = 64
    """64 for the gated delta rule, the model's chunk size for Mamba2, at least the page."""
    interval_tokens: int = 256
    """`--mamba-track-interval`."""
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    """`--chunked-prefill-size`."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a length below one token."""
        for name in ("grid_tokens", "interval_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")

    plans_ahead: ClassVar[bool] = False

    def depths(self, request: Request, match: Match) -> Sequence[int]:
        """One position a chunk, and the last multiple of the interval while decoding."""
        grid, interval = self.grid_tokens, math.lcm(self.interval_tokens, self.grid_tokens)
        prompt = request.num_prompt_tokens
        branch = min(match.num_live_tokens, prompt - 1) // grid * grid
        made: list[int] = []
        for start, end in _chunks(match.checkpoint.depth, prompt, self.chunk_tokens):
            tracked = start + (end - start) // grid * grid
            if tracked == start:
                continue
            if start < branch < end and (branch - start) % grid == 0:
                tracked = branch
            if tracked <= request.num_known_tokens:
                made.append(tracked)
        decoded = request.last_known_depth(interval)
        if decoded > prompt:
            made.append(decoded)
        return made


@dataclass(frozen=True, slots=True)
class NoBuffer:
    """`no_buffer`: the exact end of each chunk and of the request, cut to `grid_tokens`, 1 being exact."""

    grid_tokens: int = 1
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS
    """`--chunked-prefill-size`."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a length below one token."""
        for name in ("grid_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")

    plans_ahead: ClassVar[bool] = False

    def depths(self, request: Request, match: Match) -> Sequence[int]:
        """The ends of the chunks and of the request."""
        grid, last = self.grid_tokens, request.last_known_depth(self.grid_tokens)
        hit = match.checkpoint.depth
        chunks = _chunks(hit, request.num_prompt_tokens, self.chunk_tokens)
        ends = {min(end // grid * grid, last) for _, end in chunks} | {last}
        return sorted(end for end in ends if end > hit)


def _chunks(start: int, end: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """The forwards of a prefill from `start` to `end`."""
    while start < end:
        step = min(start + chunk_tokens, end)
        yield start, step
        start = step
