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


class Pair(NamedTuple):
    """A quantity of one request."""

    expected: float
    seen: float


def _latest() -> deque[Pair]:
    return deque(maxlen=NUM_LATEST)


@dataclass(frozen=True, slots=True)
class Placed:
    """The latest requests of one rank."""

    ttft_s: deque[Pair] = field(default_factory=_latest)
    cached_tokens: deque[Pair] = field(default_factory=_latest)

    def state(self) -> dict[str, Any]:
        """Means and medians, as `GET /router` shows them; None where there is no request."""
        return {"ttft_s": _compared(self.ttft_s), "cached_tokens": _compared(self.cached_tokens)}


def _compared(pairs: deque[Pair]) -> dict[str, Any] | None:
    if not pairs:
        return None
    told: dict[str, Any] = {"num_requests": len(pairs)}
    for name, values in zip(Pair._fields, zip(*pairs, strict=True), strict=True):
        told[name] = {"mean": round(fmean(values), 6), "median": round(median(values), 6)}
    return told
