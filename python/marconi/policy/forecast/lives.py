"""The last lives of states: what each was like, when its wait began, and whether and when it ended in a use.

A *life* begins when a state is made, used, or changes its role, and ends with the next use, with a change of role, or,
for a state whose use could not be seen any more, with its eviction; a life that still goes on counts as unused so far.
The ring holds the last `capacity` lives, the oldest giving way.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from marconi.policy.eviction.base import NodeView
from marconi.policy.forecast.ages import Floats, Ints


class Lives:
    """A ring of lives, at most one going on for each holder."""

    __slots__ = ("_holders", "_next", "_slots", "began_s", "ended_s", "levels", "strata", "used")

    def __init__(self, capacity: int, num_factors: int) -> None:
        """`ValueError` for a capacity below 1."""
        if capacity < 1:
            raise ValueError(f"a history of {capacity} lives; 1 or more is right")
        self.strata = np.zeros(capacity, np.int64)
        self.levels = np.zeros((capacity, num_factors), np.int64)
        self.began_s = np.zeros(capacity)
        self.ended_s = np.full(capacity, np.nan)
        self.used = np.zeros(capacity, np.bool_)
        self._holders: list[NodeView | None] = [None] * capacity
        self._slots: dict[NodeView, int] = {}
        self._next = 0

    def __len__(self) -> int:
        return min(self._next, len(self._holders))

    def stratum(self, holder: NodeView) -> int | None:
        """The stratum of the life that `holder` is in, if any."""
        slot = self._slots.get(holder)
        return None if slot is None else int(self.strata[slot])

    def begin(self, holder: NodeView, stratum: int, levels: Sequence[int], now_s: float) -> None:
        """A life of `holder` begins; one that goes on ends unused."""
        self.end(holder, now_s)
        slot = self._next % len(self._holders)
        self._next += 1
        oldest = self._holders[slot]
        if oldest is not None:
            del self._slots[oldest]
        self.strata[slot] = stratum
        self.levels[slot] = levels
        self.began_s[slot] = now_s
        self.ended_s[slot] = np.nan
        self.used[slot] = False
        self._holders[slot] = holder
        self._slots[holder] = slot

    def end(self, holder: NodeView, now_s: float, *, used: bool = False) -> None:
        """The life of `holder`, if one goes on, ends."""
        slot = self._slots.pop(holder, None)
        if slot is not None:
            self.ended_s[slot] = now_s
            self.used[slot] = used
            self._holders[slot] = None

    def ages_s(self, now_s: float) -> Floats:
        """How long each life took, or has gone on for."""
        num = len(self)
        ended_s = self.ended_s[:num]
        return np.maximum(np.where(np.isnan(ended_s), now_s, ended_s) - self.began_s[:num], 1e-3)

    def seen(self) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Stratum, levels and use of each life."""
        num = len(self)
        return self.strata[:num], self.levels[:num], self.used[:num]
