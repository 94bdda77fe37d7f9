"""The last lives of states: what each was like, when its wait began, and whether and when it ended in a use.

A *life* begins when a state is made, used, or changes its role, and ends with the next use, with a change of role, or,
for a state whose use could not be seen any more, with its eviction; a life that still goes on counts as unused so far.
The ring holds the last `capacity` lives, the oldest giving way. It is written a life at a time, for which the
standard library's arrays are quicker than numpy's; a fit reads them in place.

A state is known by the serial of its node, so that a life keeps no node, and nothing of its span, in memory.
"""

import math
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from marconi.policy.forecast.ages import Floats, Ints


class Lives:
    """A ring of lives, at most one going on for each state."""

    __slots__ = ("_next", "_num_factors", "_serials", "_slots", "began_s", "ended_s", "levels", "strata", "used")

    def __init__(self, capacity: int, num_factors: int) -> None:
        """`ValueError` for a capacity below 1. A life has a level, 0 to 255, of each of `num_factors` factors."""
        if capacity < 1:
            raise ValueError(f"a history of {capacity} lives; 1 or more is right")
        self.strata = array("q", bytes(8 * capacity))
        self.levels = bytearray(capacity * num_factors)
        self.began_s = array("d", bytes(8 * capacity))
        self.ended_s = array("d", [math.nan]) * capacity
        self.used = bytearray(capacity)
        self._num_factors = num_factors
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
        self.strata[slot] = stratum
        first = slot * self._num_factors
        self.levels[first : first + self._num_factors] = bytes(levels)
        self.began_s[slot] = now_s
        self.ended_s[slot] = math.nan
        self.used[slot] = False
        self._serials[slot] = serial
        self._slots[serial] = slot, stratum

    def end(self, serial: int, now_s: float, *, used: bool = False) -> None:
        """The life of a state, if one goes on, ends."""
        going_on = self._slots.pop(serial, None)
        if going_on is not None:
            slot = going_on[0]
            self.ended_s[slot] = now_s
            self.used[slot] = used
            self._serials[slot] = None

    def ages_s(self, now_s: float) -> Floats:
        """How long each life took, or has gone on for."""
        num = len(self)
        began_s, ended_s = np.frombuffer(self.began_s)[:num], np.frombuffer(self.ended_s)[:num]
        return np.maximum(np.where(np.isnan(ended_s), now_s, ended_s) - began_s, 1e-3)

    def seen(self) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Stratum, levels and use of each life."""
        num, num_factors = len(self), self._num_factors
        levels = np.frombuffer(self.levels, np.uint8)[: num * num_factors].reshape(num, num_factors)
        strata, used = np.frombuffer(self.strata, np.int64), np.frombuffer(self.used, np.bool_)
        return strata[:num], levels.astype(np.int64), used[:num]
