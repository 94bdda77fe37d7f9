"""The last lives of states: what each was like, when its wait began, and whether and when it ended in a use.

A *life* begins when a state is made, used, or changes its role, and ends with the next use, with a change of role, or,
for a state whose use could not be seen any more, with its eviction; a life that still goes on counts as unused so far.
The ring holds the last `capacity` lives, the oldest giving way.

A state is known by the serial of its node, so that a life keeps no node, and nothing of its span, in memory.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from marconi.policy.forecast.ages import Floats, Ints


class _Cells(NamedTuple):
    """The arrays of lives as `memoryview`s: setting one number there takes a fraction of what it does in an array."""

    strata: Any
    levels: Any
    began_s: Any
    ended_s: Any
    used: Any


class Lives:
    """A ring of lives, at most one going on for each state."""

    __slots__ = ("_cells", "_next", "_serials", "_slots", "began_s", "ended_s", "levels", "strata", "used")

    def __init__(self, capacity: int, num_factors: int) -> None:
        """`ValueError` for a capacity below 1."""
        if capacity < 1:
            raise ValueError(f"a history of {capacity} lives; 1 or more is right")
        self.strata = np.zeros(capacity, np.int64)
        self.levels = np.zeros((capacity, num_factors), np.int64)
        self.began_s = np.zeros(capacity)
        self.ended_s = np.full(capacity, np.nan)
        self.used = np.zeros(capacity, np.bool_)
        arrays: tuple[Any, ...] = self.strata, self.levels, self.began_s, self.ended_s, self.used
        self._cells = _Cells(*(memoryview(each) for each in arrays))
        self._serials: list[int | None] = [None] * capacity
        """Of each slot, whose life goes on there."""
        self._slots: dict[int, tuple[int, int]] = {}
        """Of each life that goes on its slot and its stratum."""
        self._next = 0

    def __len__(self) -> int:
        return min(self._next, len(self._serials))

    def stratum(self, serial: int) -> int | None:
        """The stratum of the life that a state is in, if any."""
        going_on = self._slots.get(serial)
        return None if going_on is None else going_on[1]

    def begin(self, serial: int, stratum: int, levels: Sequence[int], now_s: float) -> None:
        """A life of a state begins; one that goes on ends unused."""
        self.end(serial, now_s)
        slot = self._next % len(self._serials)
        self._next += 1
        oldest = self._serials[slot]
        if oldest is not None:
            del self._slots[oldest]
        cells = self._cells
        cells.strata[slot] = stratum
        for factor, level in enumerate(levels):
            cells.levels[slot, factor] = level
        cells.began_s[slot] = now_s
        cells.ended_s[slot] = math.nan
        cells.used[slot] = False
        self._serials[slot] = serial
        self._slots[serial] = slot, stratum

    def end(self, serial: int, now_s: float, *, used: bool = False) -> None:
        """The life of a state, if one goes on, ends."""
        going_on = self._slots.pop(serial, None)
        if going_on is not None:
            slot = going_on[0]
            self._cells.ended_s[slot] = now_s
            self._cells.used[slot] = used
            self._serials[slot] = None

    def ages_s(self, now_s: float) -> Floats:
        """How long each life took, or has gone on for."""
        num = len(self)
        ended_s = self.ended_s[:num]
        return np.maximum(np.where(np.isnan(ended_s), now_s, ended_s) - self.began_s[:num], 1e-3)

    def seen(self) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Stratum, levels and use of each life."""
        num = len(self)
        return self.strata[:num], self.levels[:num], self.used[:num]
