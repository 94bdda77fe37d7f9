"""The rule `best`: the least expected saving per byte and second is evicted first.

    worth(n) = g(n, age) * share(n) * saved tokens(n) / bytes that evicting n frees

g is the Gittins index of the time to the next use (`forecast/hazard.py`), in uses per second, forecast from how states
of its role, rhythm and traits were used so far (`forecast/forecast.py`); age is the time since its last use. Saved
tokens are those beyond the nearest shallower state. A prompt that no request has continued yet has several states near
its end, and g is then the prompt's: share is the part of the continuations of such prompts that would start from this
state (`forecast/turns.py`), as counted in this server and, before any are, by a prior. It is 1 for every other state.

A state that is only planned has the worth that it would have now, and gets a slot if that is more than the worth of
the state that would be evicted for it (`outranks`). This has several effects, none of which has a rule of its own:

- where slots are short, a prompt keeps the one state near its end that serves most of the likely continuations; where
  they are not, it keeps all;
- dead KV does not exist in the tree; a state that its conversation has passed is used so rarely that it is evicted
  first, which thins a path to its end, its guard and its branch points;
- a branch point that has proved itself is young at every use, and many come through;
- conversations are waited for by their own rhythm, and no longer than others like them took; where more of them wait
  than fit, those that have waited longest stay until they go on;
- a document read once is worth less than a conversation, as soon as the lives of such states show it;
- a state evicted too early counts as used when its ghost is missed, so a wrong prior costs a few requests.

Rates are learned while serving (`forecast/forecast.py`); before the first uses are seen they fall as 1 / age for all,
and the rule is LRU by saving per byte.

A node is ranked with the forecast of when it was last reported; the least is ranked again with the present one before
it is evicted, up to `MAX_RERANKS` times. A victim costs O(classes), no more than strata times levels, and a change the
move of a part of its class.

Classes and not a sample: the least of 64 candidates drawn at random (as libCacheSim's sampled policies) would need no
classes, but moves the hit rates of docs/hit-rate.md by -1.07 to +0.95 points, at five of 32 below -0.3, and of 512
still by -0.39 to +0.95.

Classes. Of a state only its age changes by itself, so states whose worth changes with age alike are a class: a stratum
of the forecast, and a level.

    worth(n) = index[stratum(n), age(n)] * 2 ** (level(n) / LEVELS_PER_OCTAVE)

The index first rises with age, then falls; either part may be missing. It is given at the middles of the age bins and
read between them along the logarithms of both. So within a class no node is worth less than both its oldest and its
youngest. The oldest are weighed at every victim, each on the *piece* of the index between two middles that its age lies
in. The piece is looked up when a class has another oldest, and when the age passes the piece's end. A youngest can be
the least only before the peak of its index, and only if a new one would be. So a victim costs a logarithm and a few
sums for each class that holds a node, in floats: for some dozens of them calls into numpy would take longer. Other
victims at the same time cost them for the classes that have changed alone. A class is a sorted list, of which a change
moves what comes after it: at once, as long as a class has no more than some 10,000 nodes.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from marconi.policy.base import Costs, Eviction, Need, NodeView, PlannedState, Scope, for_states
from marconi.policy.eviction.order import Octaves
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.forecast.hazard import NUM_BINS, Floats
from marconi.policy.request import Lease

MAX_RERANKS: Final = 4
LEVELS_PER_OCTAVE: Final = 3
_LEVELS: Final = Octaves(LEVELS_PER_OCTAVE, least=1e-30)
level_of: Final = _LEVELS.step
"""The level of a worth at an index of 1."""

_SLACK: Final = 1e-9
"""The margin for rounding in a bound on a logarithm."""

_Entry: TypeAlias = tuple[float, int, NodeView]
"""Last hit, serial and node."""

_Piece: TypeAlias = tuple[float, float, float, int, float]
"""(since_s, index, rise, lower, level) of `index + rise * (log2(now_s - since_s) + 0.5 - lower) + level`."""


def log2_worth(log2_index: Sequence[float], level: int, age_s: float) -> float:
    """log2 of the worth of a node, from log2 of its stratum's index, its level and its age in seconds."""
    # Where the age lies among the bins' middles, in the logarithm: b for the middle of bin b.
    place = min(max(math.log2(max(age_s, 0.5)) + 0.5, 0.0), NUM_BINS - 1.0)
    lower = min(int(place), NUM_BINS - 2)
    index = log2_index[lower]
    rise = log2_index[lower + 1] - index  # exactly 0 where the index is level, so that equal ones stay equal
    return index + rise * (place - lower) + level / LEVELS_PER_OCTAVE


class _Class:
    """The nodes of one stratum and level."""

    __slots__ = ("entries", "floor", "head", "key", "level", "number", "row", "until_s")

    def __init__(self, key: tuple[int, int], number: int) -> None:
        self.key = key
        self.number = number
        """Counted from 1, in the order in which classes were made."""
        self.level = key[1] / LEVELS_PER_OCTAVE
        self.entries: list[_Entry] = []
        """The oldest first."""
        self.head: _Entry | None = None
        """The oldest, when last looked at."""
        self.row = -1
        """Where it is among the classes that hold a node."""
        self.until_s = math.inf
        """When the age of the oldest leaves its piece of the index."""
        self.floor = math.inf
        """log2 of the least worth of a node before the peak; infinite where the index only falls."""


_ABSENT: Final = (_Class((0, 0), 0), math.nan)


class AgeingClasses:
    """Nodes by class and last hit, of which the oldest and the youngest of all classes are weighed together."""

    __slots__ = (
        "_changed",
        "_classes",
        "_floor",
        "_index",
        "_now_s",
        "_pieces",
        "_rises_until_s",
        "_rows",
        "_source",
        "_until_s",
        "_worths",
        "held",
    )

    def __init__(self) -> None:
        self.held: dict[NodeView, tuple[_Class, float]] = {}
        """Class and last hit of each node."""
        self._classes: dict[tuple[int, int], _Class] = {}
        self._rows: list[_Class] = []
        """Those that hold a node."""
        self._pieces: list[_Piece] = []
        """Key of each row's oldest node."""
        self._changed: dict[_Class, None] = {}
        """Classes that may have another oldest."""
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
        self._worths: list[float] = []
        """Each row's oldest node's at `_now_s`."""

    def class_of(self, node: NodeView) -> tuple[int, int] | None:
        """The stratum and level of `node`."""
        held = self.held.get(node)
        return None if held is None else held[0].key

    def put(self, node: NodeView, stratum: int, level: int) -> None:
        """Add `node`, or move it."""
        key, last_hit_s = (stratum, level), node.last_hit_s
        held = self.held.get(node)
        if held is not None:
            if held[0].key == key and held[1] == last_hit_s:
                return
            self.discard(node)
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = _Class(key, len(self._classes) + 1)
        self.held[node] = found, last_hit_s
        entry = last_hit_s, node.serial, node
        insort(found.entries, entry)
        if found.head is None or entry < found.head:
            self._changed[found] = None

    def discard(self, node: NodeView) -> None:
        """Remove `node` if it is there."""
        held = self.held.pop(node, None)
        if held is not None:
            found, last_hit_s = held
            entries = found.entries
            del entries[bisect_left(entries, (last_hit_s, node.serial))]
            if found.head is None or node is found.head[2]:
                self._changed[found] = None

    def least(self, log2_index: Floats, now_s: float) -> NodeView | None:
        """The least valuable of the classes' oldest and youngest; of equal ones the oldest, then the one made first.

        Exact while each stratum of the index has one peak.
        """
        if not self.held:
            return None
        self._look_up(log2_index, now_s)
        worths = self._worths
        least = min(worths)
        if self._floor <= least + _SLACK:
            return self._least_of_both_ends(worths, now_s)
        if worths.count(least) == 1:
            head = self._rows[worths.index(least)].head
            return None if head is None else head[2]
        return self._first_of([found for found, worth in zip(self._rows, worths, strict=True) if worth == least])

    def worths(self, nodes: Sequence[NodeView], log2_index: Floats, now_s: float) -> Floats:
        """log2 of the worth of each node, as `log2_worth` has it, and its last hit."""
        get = self.held.get
        numbers = np.array([get(node, _ABSENT)[0].number for node in nodes], np.intp)
        keys = np.array([(0, 0), *self._classes], np.int64)[numbers]
        last_hits_s = np.array([node.last_hit_s for node in nodes], np.float64)
        ages_s = np.maximum(now_s - last_hits_s, 0.5)
        places = np.clip(np.log2(ages_s) + 0.5, 0.0, NUM_BINS - 1.0)
        lower = np.minimum(places.astype(np.int64), NUM_BINS - 2)
        index = log2_index[keys[:, 0], lower]
        rise = log2_index[keys[:, 0], lower + 1] - index
        worths = index + rise * (places - lower) + keys[:, 1] / LEVELS_PER_OCTAVE
        return np.stack((np.where(numbers == 0, np.nan, worths), last_hits_s), axis=1)

    def kept_instead(self, victim: NodeView) -> tuple[NodeView, float] | None:
        """The least valuable oldest of another class, as it was weighed for `victim`, the oldest of its own."""
        held, worths = self.held.get(victim), self._worths
        if held is None:
            return None
        head, row = held[0].head, held[0].row
        if head is None or head[2] is not victim or row >= len(worths):
            return None
        least = min([*worths[:row], *worths[row + 1 :]], default=math.inf)
        if least == math.inf:
            return None
        at = worths.index(least)
        kept = self._rows[at if at != row else worths.index(least, row + 1)].head
        return None if kept is None else (kept[2], 2.0 ** (least - worths[row]))

    def _least_of_both_ends(self, worths: list[float], now_s: float) -> NodeView | None:
        """Find the least like `least`, with the youngest of rows whose index rises."""
        ends: list[tuple[float, float, int, NodeView]] = []
        least = min(worths)
        for found, worth in zip(self._rows, worths, strict=True):
            if found.head is not None and worth <= least:
                ends.append((worth, *found.head))
            if found.floor <= least + _SLACK:
                stratum, level = found.key
                entries = found.entries
                latest_s = entries[-1][0]
                if now_s - latest_s < self._rises_until_s[stratum]:
                    # Of several nodes with the latest hit the one made first.
                    youngest = entries[bisect_left(entries, (latest_s,))]
                    ends.append((log2_worth(self._index[stratum], level, now_s - latest_s), *youngest))
        return min(ends)[3]

    @staticmethod
    def _first_of(rows: list[_Class]) -> NodeView:
        return min(found.head for found in rows if found.head is not None)[2]

    # Looking up pieces

    def _look_up(self, log2_index: Floats, now_s: float) -> None:
        """Bring the rows, their pieces and their worths up to date."""
        is_new = log2_index is not self._source
        if is_new:
            self._source = log2_index
            self._index = log2_index.tolist()
            peaks = [index.index(max(index)) for index in self._index]
            self._rises_until_s = [2.0 ** (peak - 0.5) if peak else 0.0 for peak in peaks]
        if self._changed:
            self._look_at_changed(now_s)
        if is_new or now_s < self._now_s:
            self._floor = math.inf
            for found in self._rows:
                self._bound(found)
            self._place(self._rows, now_s)
        elif now_s >= self._until_s:
            self._place([found for found in self._rows if now_s >= found.until_s], now_s)
        elif now_s == self._now_s:
            return
        log2 = math.log2
        self._worths = [
            index + rise * (log2(now_s - since_s) + 0.5 - lower) + level
            for since_s, index, rise, lower, level in self._pieces
        ]
        self._now_s = now_s

    def _look_at_changed(self, now_s: float) -> None:
        rows, pieces, worths = self._rows, self._pieces, self._worths
        for found in self._changed:
            entries = found.entries
            if not entries:
                if found.row >= 0:
                    self._remove_row(found)
            elif entries[0] is not found.head:
                found.head = entries[0]
                piece = self._piece(found, now_s)
                since_s, index, rise, lower, level = piece
                worth = index + rise * (math.log2(now_s - since_s) + 0.5 - lower) + level
                if found.row < 0:
                    found.row = len(rows)
                    rows.append(found)
                    pieces.append(piece)
                    worths.append(worth)
                    self._bound(found)
                else:
                    pieces[found.row], worths[found.row] = piece, worth
                self._until_s = min(self._until_s, found.until_s)
        self._changed.clear()

    def _remove_row(self, found: _Class) -> None:
        last, piece, worth = self._rows.pop(), self._pieces.pop(), self._worths.pop()
        if last is not found:
            last.row = found.row
            self._rows[last.row], self._pieces[last.row], self._worths[last.row] = last, piece, worth
        found.row, found.head = -1, None

    def _bound(self, found: _Class) -> None:
        stratum = found.key[0]
        found.floor = self._index[stratum][0] + found.level if self._rises_until_s[stratum] else math.inf
        self._floor = min(self._floor, found.floor)

    def _place(self, rows: list[_Class], now_s: float) -> None:
        for found in rows:
            self._pieces[found.row] = self._piece(found, now_s)
        self._until_s = min([found.until_s for found in self._rows], default=math.inf)

    def _piece(self, found: _Class, now_s: float) -> _Piece:
        """The piece of a class's oldest, which has one; says when it ends."""
        assert found.head is not None
        last_hit_s, index = found.head[0], self._index[found.key[0]]
        place = math.log2(max(now_s - last_hit_s, 0.5)) + 0.5
        lower = int(place)
        if place <= 0.0:
            found.until_s = last_hit_s + math.sqrt(0.5)
            return now_s - 1.0, index[0], 0.0, 0, found.level
        if lower > NUM_BINS - 2:
            found.until_s = math.inf
            return now_s - 1.0, index[-2] + (index[-1] - index[-2]), 0.0, 0, found.level
        found.until_s = last_hit_s + 2.0 ** (lower + 0.5)
        return last_hit_s, index[lower], index[lower + 1] - index[lower], lower, found.level


class BestEviction(Eviction):
    """Forecast saving per byte and second."""

    scope = Scope.ANY
    follows_ghosts = True

    def __init__(
        self,
        costs: Costs,
        forecast: Forecast,
        needs: frozenset[Need] = frozenset({Need.BYTES}),
        saved: Callable[[NodeView, Need], float] | None = None,
    ) -> None:
        """`saved` is what a use of a node saves, by what is short; by default tokens beyond the shallower state."""
        self._costs = costs
        self.forecast = forecast
        self.turns, self.guard = forecast.turns, forecast.divergence
        self._saved = saved
        self._classes = {need: AgeingClasses() for need in sorted(needs, key=lambda need: need.value)}

    def for_copies(self, needs: frozenset[Need], saved: Callable[[NodeView, Need], float]) -> "BestEviction":
        """Rank copies by the same forecast: a state on the host is used as one on the device is."""
        return BestEviction(self._costs, self.forecast, needs, saved)

    def arrived(self, lease: Lease, now_s: float) -> None:
        """Learn from the request."""
        self.forecast.arrived(lease, now_s)

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """Note what the states are like."""
        self.forecast.left(nodes, lease, now_s)

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Note that `node` cannot be used any more, or only in vain."""
        self.forecast.now_s = now_s
        if not node.has_copy:
            self.forecast.gone(node, now_s)

    def update(self, node: NodeView) -> None:
        """Rank `node` with the present forecast."""
        stratum, weight = self.forecast.standing(node, self.forecast.now_s)
        costs, saved_by, bounds = self._costs, self._saved, _LEVELS.bounds
        for need, classes in self._classes.items():
            if need is Need.KV and node.num_children:
                classes.discard(node)
                continue
            num_bytes = 0 if need is Need.KV else costs.state_bytes
            if need is not Need.STATE:
                num_bytes += node.freed_tokens * costs.kv_bytes_per_token
            saved = node.depth - node.checkpoint_depth_above if saved_by is None else saved_by(node, need)
            # What costs nothing to hold counts as one byte. The level is `level_of` without a call for each rank.
            level = _LEVELS.first + bisect_right(bounds, weight * saved / (num_bytes or 1))
            classes.put(node, stratum, level)

    def discard(self, node: NodeView) -> None:
        """Forget its rank; what is not in use, waited for, leaving, set aside or in another tier has lost its state."""
        for classes in self._classes.values():
            if node in classes.held:
                classes.discard(node)
        is_elsewhere = node.first_waiting is not None or node.leaving is not None or node.set_aside
        if not (is_elsewhere or node.num_locks or node.has_copy):
            self.forecast.gone(node, self.forecast.now_s)

    def outranks(self, planned: PlannedState, victim: NodeView, need: Need, now_s: float) -> bool:
        """Compare what is expected of a state that is left now with the worth of `victim`."""
        held = self._classes[need].class_of(victim)
        if held is None:
            return True
        stratum, weight = self.forecast.expected(planned, now_s)
        level = level_of(weight * planned.share * planned.num_saved_tokens / self._costs.state_bytes)
        worth = log2_worth(self.forecast.log2_index[stratum], level, 0.0)
        return worth > log2_worth(self.forecast.log2_index[held[0]], held[1], now_s - victim.last_hit_s)

    def worths(self, nodes: Sequence[NodeView], now_s: float) -> Floats:
        """log2 of the worth by the forecast of when the node was last reported, and the last hit."""
        return for_states(self._classes).worths(nodes, self.forecast.log2_index, now_s)

    def kept_instead(self, victim: NodeView, need: Need) -> tuple[NodeView, float] | None:
        """The next of least worth, as it was weighed for `victim`."""
        return self._classes[need].kept_instead(victim)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The node of least worth; `KeyError` for a need that the rule was not made for."""
        self.forecast.now_s = now_s
        classes = self._classes[need]
        for _ in range(MAX_RERANKS):
            node = classes.least(self.forecast.log2_index, now_s)
            if node is None:
                return None
            before = classes.held[node]
            self.update(node)
            if classes.held.get(node) is before:
                return node
        return classes.least(self.forecast.log2_index, now_s)
