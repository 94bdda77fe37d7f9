"""The trace's time in place of the machine's, so that a replay gives the same hits on every machine."""

from typing import Any


class TraceClock:
    """Stands where the last request to arrive put it, in seconds from the start of the trace."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._caches: list[Any] = []

    def __call__(self) -> float:
        """Seconds."""
        return self._now_s

    @property
    def now_s(self) -> float:
        """Seconds; whoever sets them has the caches go on by a tick of that time."""
        return self._now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self._now_s = now_s
        for cache in self._caches:
            cache.adopt(cache.first_rank.tick(now_s))

    def ticks(self, cache: Any) -> Any:
        """Give `cache`, whose first rank reads this clock, a tick now and whenever the time is set."""
        self._caches.append(cache)
        cache.adopt(cache.first_rank.tick(self._now_s))
        return cache
