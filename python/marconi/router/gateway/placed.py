"""First tokens and hits of a rank's latest requests, as expected and as seen.

    first token     of streams, from their dispatch; of an answer that comes whole it cannot be seen
    cached tokens   of prompts whose tokens are known, where their answers say what was cached

Owner: `Gateway`, as long as it has the rank.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Final, NamedTuple

NUM_LATEST: Final = 100


class FirstToken(NamedTuple):
    """Seconds from the dispatch of a stream to its first token."""

    expected: float
    seen: float


class CachedTokens(NamedTuple):
    """Tokens of a prompt that were cached, and all of them."""

    expected: int
    seen: int
    prompt: int


@dataclass(frozen=True, slots=True)
class Placed:
    """The latest requests of one rank."""

    ttft_s: deque[FirstToken] = field(default_factory=lambda: deque(maxlen=NUM_LATEST))
    cached_tokens: deque[CachedTokens] = field(default_factory=lambda: deque(maxlen=NUM_LATEST))

    def state(self) -> dict[str, Any]:
        """Means and medians, as `GET /router` shows them; None where there is no request."""
        return {"ttft_s": _compared(self.ttft_s), "cached_tokens": _compared(self.cached_tokens)}


def _compared(latest: deque[FirstToken] | deque[CachedTokens]) -> dict[str, Any] | None:
    if not latest:
        return None
    told: dict[str, Any] = {"num_requests": len(latest)}
    for name, values in zip(latest[0]._fields, zip(*latest, strict=True), strict=True):
        told[name] = {"mean": round(fmean(values), 6), "median": round(median(values), 6)}
    return told
