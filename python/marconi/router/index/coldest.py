"""Which block goes first when there are too many: the leaf that was stored or asked for longest ago.

Time is a count of ticks. Only leaves go, so what is left of a path is always a prefix of it, and a shared one stays as
long as anything below it; a block that becomes a leaf is as warm as the warmest that went from below it. So a cold
branch goes as a whole, from its end. A heap of `tick, row` in one number; a row stands in it at most once and with a
tick that may be old, which is found out when it comes up: O(log n) a block.
"""

from array import array
from collections.abc import Callable
from heapq import heappop, heappush

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1


class Coldest:
    """Ticks of rows, and the order of the leaves among them."""

    __slots__ = ("_heap", "_is_queued", "_now", "_ticks")

    def __init__(self) -> None:
        self._now = 0
        self._ticks = array("q")
        self._is_queued = bytearray()
        self._heap: list[int] = []

    def grow(self, num_rows: int) -> None:
        """Make room for `num_rows` more."""
        self._ticks.extend(array("q", (0,)) * num_rows)
        self._is_queued.extend(bytes(num_rows))

    def touch(self, row: int) -> None:
        """Used now."""
        self._now += 1
        self._ticks[row] = self._now

    def hand_up(self, row: int, parent: int) -> None:
        """The row goes, and what is before it is at least as warm as the row was."""
        self._ticks[parent] = max(self._ticks[parent], self._ticks[row])

    def forget(self, row: int) -> None:
        """Never used: the row is another block's from now on."""
        self._ticks[row] = 0

    def offer(self, row: int) -> None:
        """A row that is a leaf now."""
        if not self._is_queued[row]:
            self._is_queued[row] = 1
            heappush(self._heap, self._ticks[row] << _ROW_BITS | row)

    def pop(self, is_leaf: Callable[[int], bool]) -> int | None:
        """The coldest leaf, no longer in the order; None if there is none."""
        while self._heap:
            entry = heappop(self._heap)
            row = entry & _ROW_MASK
            self._is_queued[row] = 0
            if not is_leaf(row):
                continue
            if self._ticks[row] != entry >> _ROW_BITS:
                self.offer(row)
                continue
            return row
        return None

    def is_queued(self, row: int) -> bool:
        """Whether the row will come up."""
        return bool(self._is_queued[row])
