"""Nodes in classes whose worth falls with age alike: the least is found among the classes' oldest.

    worth(n) = index[stratum(n), age(n)] * 2 ** (level(n) / LEVELS_PER_OCTAVE)

The index falls with age, given at the middles of the age bins and read between them along the logarithms of both. A
class is a stratum and a level, so within it the oldest is the least. All classes' oldest are weighed at once, in
arrays that are kept up to date: O(number of classes) in a few vector operations, and O(log n) for the queues.
"""

import math
from typing import Final

import numpy as np

from marconi.policy.eviction.base import NodeView
from marconi.policy.eviction.queue import VictimQueue
from marconi.policy.forecast.ages import NUM_BINS, Floats, Ints, place_of

LEVELS_PER_OCTAVE: Final = 3


def level_of(worth: float) -> int:
    """The level of a worth at an index of 1: its log2 in steps of 1 / `LEVELS_PER_OCTAVE`, rounded down."""
    return math.floor(math.log2(max(worth, 1e-30)) * LEVELS_PER_OCTAVE)


def log2_worth(log2_index: Floats, strata: Ints, levels: Floats, ages_s: Floats) -> Floats:
    """log2 of the worth of nodes, from log2 of the index and, of each node, its stratum, level and age in seconds."""
    place = place_of(ages_s)
    lower = np.minimum(place.astype(np.int64), NUM_BINS - 2)
    part = place - lower
    index = log2_index[strata, lower]
    rise = log2_index[strata, lower + 1] - index  # exactly 0 where the index is level, so that equal ones stay equal
    worth: Floats = index + rise * part + levels / LEVELS_PER_OCTAVE
    return worth


class AgeingClasses:
    """Queues by last hit, one for each class that has had nodes, whose oldest are weighed together."""

    __slots__ = ("_changed", "_class_of", "_heads", "_last_hit_s", "_levels", "_queues", "_rows", "_strata")

    def __init__(self) -> None:
        self._class_of: dict[NodeView, tuple[int, int]] = {}
        self._rows: dict[tuple[int, int], int] = {}
        """Of each class, its row in what follows."""
        self._queues: list[VictimQueue] = []
        self._heads: list[NodeView | None] = []
        self._strata: Ints = np.empty(0, np.int64)
        self._levels: Floats = np.empty(0)
        """Infinite where a class is empty."""
        self._last_hit_s: Floats = np.empty(0)
        """Of each class's oldest."""
        self._changed: dict[tuple[int, int], None] = {}
        """Classes whose oldest may be another one."""

    def class_of(self, node: NodeView) -> tuple[int, int] | None:
        """The stratum and level of `node`."""
        return self._class_of.get(node)

    def put(self, node: NodeView, stratum: int, level: int) -> None:
        """Add `node`, or move it."""
        key = (stratum, level)
        if self._class_of.get(node, key) != key:
            self.discard(node)
        self._class_of[node] = key
        if key not in self._rows:
            self._add_row(key)
        self._queues[self._rows[key]].put(node, node.last_hit_s)
        self._changed[key] = None

    def discard(self, node: NodeView) -> None:
        """Remove `node` if it is there."""
        key = self._class_of.pop(node, None)
        if key is not None:
            self._queues[self._rows[key]].discard(node)
            self._changed[key] = None

    def least(self, log2_index: Floats, now_s: float) -> NodeView | None:
        """The node of least worth; of equal ones the oldest, then the one made first."""
        if not self._class_of:
            return None
        self._look_at_changed()
        worth = log2_worth(log2_index, self._strata, self._levels, now_s - self._last_hit_s)
        rows = np.flatnonzero(worth == worth.min())
        ties: list[NodeView] = [head for row in rows if (head := self._heads[row]) is not None]
        return min(ties, key=_by_age)

    def _add_row(self, key: tuple[int, int]) -> None:
        self._rows[key] = len(self._queues)
        self._queues.append(VictimQueue())
        self._heads.append(None)
        self._strata = np.append(self._strata, key[0])
        self._levels = np.append(self._levels, math.inf)
        self._last_hit_s = np.append(self._last_hit_s, 0.0)

    def _look_at_changed(self) -> None:
        for key in self._changed:
            row = self._rows[key]
            head = self._heads[row] = self._queues[row].first()
            if head is None:
                self._levels[row] = math.inf
            else:
                self._levels[row] = key[1]
                self._last_hit_s[row] = head.last_hit_s
        self._changed.clear()


def _by_age(node: NodeView) -> tuple[float, int]:
    return node.last_hit_s, node.serial
