"""What the cache saved, as one log line at most every so often.

Counts are of finished requests since the start: `hit rate = cached prompt tokens / prompt tokens`. Owner: the
cache, on the scheduler's thread; the clock is passed in.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Budget:
    """One of the cache's two memories, in its own unit; `used` counts what is cached and what runs."""

    name: str
    used: int
    size: int


class HitReport:
    """Counts finished requests and says when a line is due: `interval_s` after the last one, 0 for never."""

    def __init__(self, interval_s: float, *, started_s: float):
        self._interval_s = interval_s
        self._last_s = started_s
        self._num_requests = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0

    def count(self, *, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Count one finished request."""
        self._num_requests += 1
        self._num_prompt_tokens += num_prompt_tokens
        self._num_cached_tokens += num_cached_tokens

    def due(self, now_s: float, budgets: Callable[[], tuple[Budget, ...]]) -> str | None:
        """The line if one is due at `now_s` (seconds of the clock that `started_s` came from), else None."""
        if self._interval_s == 0 or now_s - self._last_s < self._interval_s:
            return None
        self._last_s = now_s
        rate = self._num_cached_tokens / self._num_prompt_tokens if self._num_prompt_tokens else 0.0
        used = ", ".join(f"{budget.used} of {budget.size} {budget.name}" for budget in budgets())
        return (
            f"{self._num_requests} requests, {self._num_cached_tokens} of {self._num_prompt_tokens} "
            f"prompt tokens from the cache ({rate:.1%}); in use: {used}"
        )
