"""The measurements of each request of a replay, in order of service, before anything is summed up."""

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int], None]
"""Called with the number of further requests done."""

PROGRESS_STEP = 512
"""Requests between two calls of `Progress`."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Lists have one entry a request, in order of arrival."""

    hit_tokens: list[int]
    ttft_s: list[float]
    """From arrival to the first output token."""
    prefill_s: float
    """In all: what prefills took, and loads before them, without waiting."""
    wall_s: float
    """Run time of the replay itself; depends on the machine."""
