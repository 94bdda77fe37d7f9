"""Rules of the form recency + weight * benefit, both normalised over the evictable nodes; the least is the victim.

    S(n) = (t(n) - t_min) / unit + weight * (b(n) - b_min) / (b_max - b_min)

t(n) is when the node itself was last hit (never refreshed through a descendant), t_min the oldest among the evictable
nodes, and the unit is its age, now - t_min, unless a rule says otherwise; b(n) is the rule's benefit of keeping the
node, b_min and b_max its range over the evictable nodes. Of equal nodes the one hit longest ago is evicted. S is
compared multiplied by the unit and the range, which are the same for all nodes: whole units and whole benefits then
compare without rounding.

Finding the least must not scan: nodes of about equal benefit, within a factor of 2^(1/`CLASSES_PER_OCTAVE`), form a
class with a queue by last hit, and the victim is the least among the classes' oldest. Those are weighed with their own
benefits and the true range: O(classes), and O(log n) for the queues.

A node that is not its class's oldest may have a lower S, but hardly: the victim's exceeds the least one, S(m), by

    at most weight * b(m) * (2^(1/CLASSES_PER_OCTAVE) - 1) / (b_max - b_min),    9 % of what m's benefit counts

(counted from a benefit of 0). The exact least can be found by reading on in every class until its bound exceeds it,
but the nodes so looked at grow in number with the tree: 25 a victim among 30,000.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from marconi.policy.base import Eviction, Need, NodeView, for_states
from marconi.policy.eviction.order import Octaves, VictimQueue
from marconi.policy.eviction.spread import Spread
from marconi.policy.forecast.hazard import Floats

CLASSES_PER_OCTAVE = 8
"""Classes within a factor of two of benefit."""

benefit_class: Final = Octaves(CLASSES_PER_OCTAVE, least=1e-9).step
"""The class of a benefit."""


class ClassedEviction(Eviction):
    """Evicts the least of recency plus weighed benefit; `weight` may be changed at any time."""

    def __init__(self, weight: float, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        """`ValueError` for a negative or infinite weight."""
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight must be finite and >= 0, got {weight}")
        self.weight = weight
        self._of_need = {need: _Classes() for need in sorted(needs, key=lambda need: need.value)}

    @abstractmethod
    def benefit(self, node: NodeView) -> float:
        """The benefit of keeping `node`, in any unit, more than 0."""

    def unit_s(self, oldest_s: float, now_s: float) -> float:
        """The age that weighs as much as the range of the benefits."""
        return now_s - oldest_s

    def update(self, node: NodeView) -> None:
        """Move `node` to its class and age."""
        benefit = self.benefit(node)
        for need, classes in self._of_need.items():
            if need is Need.KV and node.num_children:
                classes.discard(node)
            else:
                classes.put(node, benefit)

    def discard(self, node: NodeView) -> None:
        """Forget `node`."""
        for classes in self._of_need.values():
            classes.discard(node)

    def worths(self, nodes: Sequence[NodeView], now_s: float) -> Floats:
        """S up to a constant, and the last hit; the victim's S exceeds the least by at most the bound above."""
        return for_states(self._of_need).worths(nodes, self.weight, now_s, self.unit_s)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The node of least S; `KeyError` for a need that the rule was not made for."""
        return self._of_need[need].least(self.weight, now_s, self.unit_s)


_ABSENT: Final = (math.nan, -1)


class _Classes:
    """Queues by last hit, one for each class that has had nodes, and the range of the benefits."""

    __slots__ = (
        "_asked",
        "_benefits",
        "_changed",
        "_held",
        "_named",
        "_oldest_s",
        "_queues",
        "_row_of_class",
        "_spread",
    )

    def __init__(self) -> None:
        self._held: dict[NodeView, tuple[float, int]] = {}
        """Benefit of each node, and the row of its class."""
        self._spread = Spread()
        """Range of the nodes' benefits."""
        self._row_of_class: dict[int, int] = {}
        self._queues: list[VictimQueue] = []
        self._oldest_s: list[float] = []
        """Last hit of each class's oldest node; infinite where the class is empty."""
        self._benefits: list[float] = []
        """Benefit of each class's oldest node; 0 where the class is empty."""
        self._changed: dict[int, None] = {}
        """Rows whose oldest may be another one."""
        self._asked: tuple[float, float, float] | None = None
        """Weight, time and unit by which `_named` is the least; None once it was evicted."""
        self._named: NodeView | None = None

    def put(self, node: NodeView, benefit: float) -> None:
        """Add `node`, or move it."""
        held = self._held.get(node)
        if held is None or held[0] != benefit:
            if held is not None:
                self.discard(node)
            held = self._held[node] = benefit, self._row(benefit)
            self._spread.add(benefit)
        row = held[1]
        self._queues[row].put(node, node.last_hit_s)
        self._changed[row] = None

    def discard(self, node: NodeView) -> None:
        """Remove `node` if it is there."""
        held = self._held.pop(node, None)
        if held is not None:
            self._queues[held[1]].discard(node)
            self._spread.remove(held[0])
            self._changed[held[1]] = None

    def least(self, weight: float, now_s: float, unit_s: Callable[[float, float], float]) -> NodeView | None:
        """The node of least S; `unit_s` gives the unit by the oldest hit and the time."""
        b_min, b_max = self._spread.least(), self._spread.greatest()
        if b_min is None or b_max is None:
            return None
        self._look_at_changed()
        t_min = min(self._oldest_s)
        unit = unit_s(t_min, now_s) or 1.0
        asked = weight, now_s, unit
        if asked == self._asked:
            return self._named
        spread = (b_max - b_min) or 1.0
        # Lists, not arrays: with some dozens of classes the calls into numpy would cost more than the sums.
        scores = [
            (oldest_s - t_min) * spread + weight * (benefit - b_min) * unit
            for oldest_s, benefit in zip(self._oldest_s, self._benefits, strict=True)
        ]
        least = min(scores)
        if scores.count(least) == 1:
            named = self._queues[scores.index(least)].first()
        else:
            heads = [self._queues[row].first() for row, score in enumerate(scores) if score == least]
            named = min((head for head in heads if head is not None), key=_by_age)
        self._asked, self._named = asked, named
        return named

    def worths(
        self, nodes: Sequence[NodeView], weight: float, now_s: float, unit_s: Callable[[float, float], float]
    ) -> Floats:
        """S of each node, counted from an age and a benefit of 0, and its last hit."""
        self._look_at_changed()
        b_min, b_max = self._spread.least() or 0.0, self._spread.greatest() or 0.0
        unit = unit_s(min(self._oldest_s, default=now_s), now_s) or 1.0
        get = self._held.get
        benefits = np.array([get(node, _ABSENT)[0] for node in nodes], np.float64)
        last_hits_s = np.array([node.last_hit_s for node in nodes], np.float64)
        scores = (last_hits_s - now_s) / unit + weight * benefits / ((b_max - b_min) or 1.0)
        return np.stack((scores, last_hits_s), axis=1)

    def _row(self, benefit: float) -> int:
        index = benefit_class(benefit)
        row = self._row_of_class.get(index)
        if row is None:
            row = self._row_of_class[index] = len(self._queues)
            self._queues.append(VictimQueue())
            self._oldest_s.append(math.inf)
            self._benefits.append(0.0)
        return row

    def _look_at_changed(self) -> None:
        if self._changed:
            self._asked = None
        for row in self._changed:
            head = self._queues[row].first()
            if head is None:
                self._oldest_s[row], self._benefits[row] = math.inf, 0.0
            else:
                self._oldest_s[row], self._benefits[row] = head.last_hit_s, self._held[head][0]
        self._changed.clear()


def _by_age(node: NodeView) -> tuple[float, int]:
    return node.last_hit_s, node.serial
