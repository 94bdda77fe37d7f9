"""The least and the greatest of numbers that come and go, of which many are equal.

Each number that is there is counted, and stands in two heaps from the first of its kind on; one that is gone is dropped
when it comes first, and all such when they are more than half. Amortised O(log d) for d different numbers, and O(1) for
one that is there already.
"""

import heapq


class Spread:
    """A multiset of numbers."""

    __slots__ = ("_counts", "_falling", "_rising")

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}
        self._rising: list[float] = []
        self._falling: list[float] = []
        """Negated."""

    def add(self, number: float) -> None:
        """Count one more of it."""
        counts = self._counts
        count = counts.get(number, 0)
        counts[number] = count + 1
        if not count:
            heapq.heappush(self._rising, number)
            heapq.heappush(self._falling, -number)
            if len(self._rising) > 64 + 2 * len(counts):
                self._rising = list(counts)
                heapq.heapify(self._rising)
            if len(self._falling) > 64 + 2 * len(counts):
                self._falling = [-each for each in counts]
                heapq.heapify(self._falling)

    def remove(self, number: float) -> None:
        """Count one less of it; `KeyError` if there is none."""
        count = self._counts[number]
        if count > 1:
            self._counts[number] = count - 1
        else:
            del self._counts[number]

    def least(self) -> float | None:
        """The least; None of nothing."""
        rising, counts = self._rising, self._counts
        while rising and rising[0] not in counts:
            heapq.heappop(rising)
        return rising[0] if rising else None

    def greatest(self) -> float | None:
        """The greatest; None of nothing."""
        falling, counts = self._falling, self._counts
        while falling and -falling[0] not in counts:
            heapq.heappop(falling)
        return -falling[0] if falling else None
