"""Nodes in classes whose worth changes with age alike: the least is found among the classes' oldest and youngest.

    worth(n) = index[stratum(n), age(n)] * 2 ** (level(n) / LEVELS_PER_OCTAVE)

The index first rises with age, then falls (`forecast/gittins.py`); either part may be missing. It is given at the
middles of the age bins and read between them along the logarithms of both. A class is a stratum and a level, so within
it no node is worth less than both its oldest and its youngest. Those of all classes are weighed at once, in arrays that
are kept up to date: O(number of classes) in a few vector operations, and O(log n) for the queues.
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
    """Queues by last hit, two for each class that has had nodes, whose oldest and youngest are weighed together."""

    __slots__ = ("_changed", "_class_of", "_heads", "_last_hit_s", "_levels", "_queues", "_rows", "_strata")

    def __init__(self) -> None:
        self._class_of: dict[NodeView, tuple[int, int]] = {}
        self._rows: dict[tuple[int, int], int] = {}
        """Of each class, its row in what follows."""
        self._queues: list[tuple[VictimQueue, VictimQueue]] = []
        """The oldest first, and the youngest first."""
        self._heads: list[tuple[NodeView, NodeView] | None] = []
        self._strata: Ints = np.empty(0, np.int64)
        self._levels: Floats = np.empty(0)
        """Infinite where a class is empty."""
        self._last_hit_s: Floats = np.empty((2, 0))
        """Of each class's oldest and youngest."""
        self._changed: dict[tuple[int, int], None] = {}
        """Classes whose oldest or youngest may be another one."""

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
        oldest, youngest = self._queues[self._rows[key]]
        oldest.put(node, node.last_hit_s)
        youngest.put(node, -node.last_hit_s)
        self._changed[key] = None

    def discard(self, node: NodeView) -> None:
        """Remove `node` if it is there."""
        key = self._class_of.pop(node, None)
        if key is not None:
            for queue in self._queues[self._rows[key]]:
                queue.discard(node)
            self._changed[key] = None

    def least(self, log2_index: Floats, now_s: float) -> NodeView | None:
        """Of the classes' oldest and youngest, that of least worth; of equal ones the oldest, then the one made first.

        Exact while each stratum of the index has one peak.
        """
        if not self._class_of:
            return None
        self._look_at_changed()
        worth = log2_worth(log2_index, self._strata, self._levels, now_s - self._last_hit_s)
        ends, rows = np.nonzero(worth == worth.min())
        pairs = zip(ends.tolist(), rows.tolist(), strict=True)
        ties: list[NodeView] = [heads[end] for end, row in pairs if (heads := self._heads[row]) is not None]
        return min(ties, key=_by_age)

    def _add_row(self, key: tuple[int, int]) -> None:
        self._rows[key] = len(self._queues)
        self._queues.append((VictimQueue(), VictimQueue()))
        self._heads.append(None)
        self._strata = np.append(self._strata, key[0])
        self._levels = np.append(self._levels, math.inf)
        self._last_hit_s = np.hstack([self._last_hit_s, np.zeros((2, 1))])

    def _look_at_changed(self) -> None:
        for key in self._changed:
            row = self._rows[key]
            oldest, youngest = (queue.first() for queue in self._queues[row])
            if oldest is None or youngest is None:
                self._heads[row] = None
                self._levels[row] = math.inf
            else:
                self._heads[row] = oldest, youngest
                self._levels[row] = key[1]
                self._last_hit_s[:, row] = oldest.last_hit_s, youngest.last_hit_s
        self._changed.clear()


def _by_age(node: NodeView) -> tuple[float, int]:
    return node.last_hit_s, node.serial
