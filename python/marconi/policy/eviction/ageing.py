"""Nodes in classes whose worth falls with age alike: the least is found among the classes' oldest.

    worth(n) = index[stratum(n), age(n)] * 2 ** (level(n) / LEVELS_PER_OCTAVE)

The index falls with age, given at the middles of the age bins and read between them along the logarithms of both. A
class is a stratum and a level, so within it the oldest is the least. All classes' oldest are weighed at once, in
arrays: O(number of classes) in a few vector operations, and O(log n) for the queues.
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
    index = log2_index[strata, lower] * (1.0 - part) + log2_index[strata, lower + 1] * part
    worth: Floats = index + levels / LEVELS_PER_OCTAVE
    return worth


class AgeingClasses:
    """Queues by last hit, one for each class that has nodes, whose heads are weighed together."""

    __slots__ = ("_class_of", "_queues")

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], VictimQueue] = {}
        self._class_of: dict[NodeView, tuple[int, int]] = {}

    def class_of(self, node: NodeView) -> tuple[int, int] | None:
        """The stratum and level of `node`."""
        return self._class_of.get(node)

    def put(self, node: NodeView, stratum: int, level: int) -> None:
        """Add `node`, or move it."""
        key = (stratum, level)
        if self._class_of.get(node, key) != key:
            self.discard(node)
        self._class_of[node] = key
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = VictimQueue()
        queue.put(node, node.last_hit_s)

    def discard(self, node: NodeView) -> None:
        """Remove `node` if it is there."""
        key = self._class_of.pop(node, None)
        if key is not None:
            queue = self._queues[key]
            queue.discard(node)
            if not len(queue):
                del self._queues[key]

    def least(self, log2_index: Floats, now_s: float) -> NodeView | None:
        """The node of least worth; of equal ones the oldest, then the one made first."""
        if not self._queues:
            return None
        heads = [head for queue in self._queues.values() if (head := queue.first()) is not None]
        keys = np.array(list(self._queues), np.int64)
        ages_s = now_s - np.array([head.last_hit_s for head in heads])
        worth = log2_worth(log2_index, keys[:, 0], keys[:, 1].astype(np.float64), ages_s)
        ties: list[NodeView] = [heads[tie] for tie in np.flatnonzero(worth == worth.min())]
        return min(ties, key=_by_age)


def _by_age(node: NodeView) -> tuple[float, int]:
    return node.last_hit_s, node.serial
