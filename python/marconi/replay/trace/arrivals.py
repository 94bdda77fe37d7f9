"""Times that a format does not have: session starts as a Poisson process, pauses as gamma-distributed (exponential)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

ANSWER_TOKENS_PER_S = 50.0
"""Decoding speed of one request in drawn times."""
SESSION_RATE = 1.0
"""Sessions a second, where a trace has no times and none is asked for."""
MIN_SESSION_RATE = 1e-9
"""Sessions a second: one in 30 years, so that drawn times stay far below what a float holds."""


def check_session_rate(session_rate: float) -> None:
    """Raise `ValueError` unless it is a number of sessions a second."""
    if not MIN_SESSION_RATE <= session_rate < math.inf:
        raise ValueError(
            f"session_rate must be a number of sessions a second, {MIN_SESSION_RATE} or more, got {session_rate}"
        )


def session_starts(session_rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Start times in seconds of sessions arriving as a Poisson process of `session_rate` a second, the first at 0."""
    start_s = 0.0
    while True:
        yield start_s
        start_s += float(rng.exponential(1.0 / session_rate))


@dataclass(frozen=True, slots=True)
class Pace:
    """How a session continues: the answer is decoded, then somebody thinks or a tool runs."""

    think_time_s: float
    """Mean of the pause between an answer's last token and the next request."""
    answer_tokens_per_s: float = ANSWER_TOKENS_PER_S
    """Infinite where the pause is meant from request to request."""
    evenness: float = 1.0
    """The gamma distribution's shape: 1 is exponential, at 16 the standard deviation is a quarter of the mean."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.think_time_s) and self.think_time_s >= 0):
            raise ValueError(f"think_time_s must be 0 or more seconds, got {self.think_time_s}")
        if not self.answer_tokens_per_s > 0:
            raise ValueError(f"answer_tokens_per_s must be positive, got {self.answer_tokens_per_s}")
        if not (math.isfinite(self.evenness) and self.evenness > 0):
            raise ValueError(f"evenness must be a positive number, got {self.evenness}")

    def gap_s(self, num_output_tokens: int, rng: np.random.Generator) -> float:
        """Seconds from a request with `num_output_tokens` to the next of its session."""
        pause_s = float(rng.gamma(self.evenness, self.think_time_s / self.evenness))
        return num_output_tokens / self.answer_tokens_per_s + pause_s
