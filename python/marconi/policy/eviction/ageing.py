"""Nodes in classes whose worth changes with age alike: the least is found among the classes' oldest and youngest.

    worth(n) = index[stratum(n), age(n)] * 2 ** (level(n) / LEVELS_PER_OCTAVE)

The index first rises with age, then falls (`forecast/hazard.py`); either part may be missing. It is given at the
middles of the age bins and read between them along the logarithms of both. A class is a stratum and a level, so within
it no node is worth less than both its oldest and its youngest.

The oldest are weighed at every victim, each on the *piece* of the index between two middles that its age lies in. The
piece is looked up when a class has another oldest, and when the age passes the piece's end. A youngest can be the least
only before the peak of its index, and only if a new one would be. So a victim costs a logarithm and a few sums for each
class that holds a node, in floats: for some dozens of them calls into numpy would take longer.
"""

import math
from collections.abc import Sequence
from typing import Final, TypeAlias

from marconi.policy.base import NodeView
from marconi.policy.eviction.octaves import Octaves
from marconi.policy.eviction.queue import Entry, VictimQueue
from marconi.policy.forecast.hazard import NUM_BINS, Floats, place_of

LEVELS_PER_OCTAVE: Final = 3
_LEVELS: Final = Octaves(LEVELS_PER_OCTAVE)

_SLACK: Final = 1e-9
"""What rounding may take from a bound on a logarithm."""

_Piece: TypeAlias = tuple[float, float, float, int, float]
"""(since_s, index, rise, lower, level) of `index + rise * (log2(now_s - since_s) + 0.5 - lower) + level`."""


def level_of(worth: float) -> int:
    """The level of a worth at an index of 1: its log2 in steps of 1 / `LEVELS_PER_OCTAVE`, rounded down."""
    return _LEVELS.step(max(worth, 1e-30))


def log2_worth(log2_index: Sequence[float], level: int, age_s: float) -> float:
    """log2 of the worth of a node, from log2 of its stratum's index, its level and its age in seconds."""
    place = place_of(age_s)
    lower = min(int(place), NUM_BINS - 2)
    index = log2_index[lower]
    rise = log2_index[lower + 1] - index  # exactly 0 where the index is level, so that equal ones stay equal
    return index + rise * (place - lower) + level / LEVELS_PER_OCTAVE


class _Class:
    """The nodes of one stratum and level."""

    __slots__ = ("floor", "head", "key", "level", "oldest", "row", "tail", "until_s", "youngest")

    def __init__(self, key: tuple[int, int]) -> None:
        self.key = key
        self.level = key[1] / LEVELS_PER_OCTAVE
        self.oldest = VictimQueue()
        self.youngest = VictimQueue()
        self.head: Entry | None = None
        """The oldest, when last looked at."""
        self.tail: NodeView | None = None
        """The youngest, when last looked at."""
        self.row = -1
        """Where it is among the classes that hold a node."""
        self.until_s = math.inf
        """When the age of the oldest leaves its piece of the index."""
        self.floor = math.inf
        """log2 of the least worth of a node before the peak; infinite where the index only falls."""


class AgeingClasses:
    """Queues by last hit, two for each class that has had nodes, whose oldest and youngest are weighed together."""

    __slots__ = (
        "_changed",
        "_classes",
        "_floor",
        "_held",
        "_index",
        "_now_s",
        "_pieces",
        "_rises_until_s",
        "_rows",
        "_source",
        "_until_s",
    )

    def __init__(self) -> None:
        self._held: dict[NodeView, tuple[_Class, float]] = {}
        """Class and last hit of each node."""
        self._classes: dict[tuple[int, int], _Class] = {}
        self._rows: list[_Class] = []
        """Those that hold a node."""
        self._pieces: list[_Piece] = []
        """Key of each row's oldest node."""
        self._changed: dict[_Class, None] = {}
        """Classes whose oldest or youngest may be another one."""
        self._source: Floats | None = None
        self._index: list[list[float]] = []
        """`_source` as lists."""
        self._rises_until_s: list[float] = []
        """Age of each stratum's highest index; 0 where the index only falls."""
        self._now_s = -math.inf
        """When the last victim was named."""
        self._until_s = math.inf
        """No piece ends earlier."""
        self._floor = math.inf
        """No row's is lower."""

    def class_of(self, node: NodeView) -> tuple[int, int] | None:
        """The stratum and level of `node`."""
        held = self._held.get(node)
        return None if held is None else held[0].key

    def put(self, node: NodeView, stratum: int, level: int) -> None:
        """Add `node`, or move it."""
        key, last_hit_s = (stratum, level), node.last_hit_s
        held = self._held.get(node)
        if held is not None:
            if held[0].key != key:
                self.discard(node)
            elif held[1] == last_hit_s:
                return
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = _Class(key)
        self._held[node] = found, last_hit_s
        found.oldest.put(node, last_hit_s)
        found.youngest.put(node, -last_hit_s)
        self._changed[found] = None

    def discard(self, node: NodeView) -> None:
        """Remove `node` if it is there."""
        held = self._held.pop(node, None)
        if held is not None:
            found = held[0]
            found.oldest.discard(node)
            found.youngest.discard(node)
            self._changed[found] = None

    def least(self, log2_index: Floats, now_s: float) -> NodeView | None:
        """Of the classes' oldest and youngest, that of least worth; of equal ones the oldest, then the one made first.

        Exact while each stratum of the index has one peak.
        """
        if not self._held:
            return None
        self._look_up(log2_index, now_s)
        log2 = math.log2
        worths = [
            index + rise * (log2(now_s - since_s) + 0.5 - lower) + level
            for since_s, index, rise, lower, level in self._pieces
        ]
        least = min(worths)
        if self._floor <= least + _SLACK:
            return self._least_of_both_ends(worths, now_s)
        if worths.count(least) == 1:
            head = self._rows[worths.index(least)].head
            return None if head is None else head[2]
        return self._first_of([found for found, worth in zip(self._rows, worths, strict=True) if worth == least])

    def _least_of_both_ends(self, worths: list[float], now_s: float) -> NodeView | None:
        """Find the least like `least`, with the youngest of rows whose index rises."""
        ends: list[tuple[float, float, int, NodeView]] = []
        least = min(worths)
        for found, worth in zip(self._rows, worths, strict=True):
            head, tail = found.head, found.tail
            if head is not None and worth <= least:
                ends.append((worth, head[2].last_hit_s, head[1], head[2]))
            if tail is not None and found.floor <= least + _SLACK:
                age_s = now_s - tail.last_hit_s
                if age_s < self._rises_until_s[found.key[0]]:
                    worth = log2_worth(self._index[found.key[0]], found.key[1], age_s)
                    ends.append((worth, tail.last_hit_s, tail.serial, tail))
        return min(ends)[3]

    @staticmethod
    def _first_of(rows: list[_Class]) -> NodeView:
        return min(found.head for found in rows if found.head is not None)[2]

    # Looking up pieces

    def _look_up(self, log2_index: Floats, now_s: float) -> None:
        """Bring the rows and their pieces up to date."""
        is_new = log2_index is not self._source
        if is_new:
            self._source = log2_index
            self._index = log2_index.tolist()
            peaks = [index.index(max(index)) for index in self._index]
            self._rises_until_s = [2.0 ** (peak - 0.5) if peak else 0.0 for peak in peaks]
        if self._changed:
            for found in self._changed:
                self._look_at(found, now_s)
            self._changed.clear()
        if is_new or now_s < self._now_s:
            self._floor = math.inf
            for found in self._rows:
                self._bound(found)
            self._place(self._rows, now_s)
        elif now_s >= self._until_s:
            self._place([found for found in self._rows if now_s >= found.until_s], now_s)
        self._now_s = now_s

    def _look_at(self, found: _Class, now_s: float) -> None:
        oldest, youngest = found.oldest.first_entry(), found.youngest.first_entry()
        if oldest is None or youngest is None:
            if found.row >= 0:
                self._remove_row(found)
            return
        found.tail = youngest[2]
        if oldest is not found.head:
            found.head = oldest
            if found.row < 0:
                found.row = len(self._rows)
                self._rows.append(found)
                self._pieces.append(self._piece(found, now_s))
                self._bound(found)
            else:
                self._pieces[found.row] = self._piece(found, now_s)
            self._until_s = min(self._until_s, found.until_s)

    def _remove_row(self, found: _Class) -> None:
        last, piece = self._rows.pop(), self._pieces.pop()
        if last is not found:
            last.row = found.row
            self._rows[last.row], self._pieces[last.row] = last, piece
        found.row, found.head, found.tail = -1, None, None

    def _bound(self, found: _Class) -> None:
        stratum = found.key[0]
        found.floor = self._index[stratum][0] + found.level if self._rises_until_s[stratum] else math.inf
        self._floor = min(self._floor, found.floor)

    def _place(self, rows: list[_Class], now_s: float) -> None:
        for found in rows:
            self._pieces[found.row] = self._piece(found, now_s)
        self._until_s = min((found.until_s for found in self._rows), default=math.inf)

    def _piece(self, found: _Class, now_s: float) -> _Piece:
        """The piece of a class's oldest, which has one; says when it ends."""
        assert found.head is not None
        last_hit_s, index = found.head[2].last_hit_s, self._index[found.key[0]]
        place = place_of(now_s - last_hit_s)
        lower = int(place)
        if place == 0.0:
            found.until_s = last_hit_s + math.sqrt(0.5)
            return now_s - 1.0, index[0], 0.0, 0, found.level
        if lower > NUM_BINS - 2:
            found.until_s = math.inf
            return now_s - 1.0, index[lower - 1] + (index[lower] - index[lower - 1]), 0.0, 0, found.level
        found.until_s = last_hit_s + 2.0 ** (lower + 0.5)
        return last_hit_s, index[lower], index[lower + 1] - index[lower], lower, found.level
