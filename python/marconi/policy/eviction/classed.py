"""Rules of the form recency + weight * benefit, both normalised over the evictable nodes; the least goes first.

    S(n) = (t(n) - t_min) / (now - t_min) + weight * (b(n) - b_min) / (b_max - b_min)

t(n) is when the node itself was last hit (never refreshed through a descendant), t_min the oldest among the evictable
nodes; b(n) is the rule's benefit of keeping the node, b_min and b_max its range over the evictable nodes.

Finding the least must not scan: a benefit is cut to `CLASSES_PER_OCTAVE` steps of a factor of two, so nodes fall into
some dozens of classes of equal benefit, in each of which the oldest is the least. A victim is the least among the
classes' oldest: O(number of classes + log n). Of equal ones the oldest hit goes first.
"""

import math
from abc import abstractmethod

from marconi.policy.eviction.base import Eviction, Need, NodeView
from marconi.policy.eviction.queue import VictimQueue

CLASSES_PER_OCTAVE = 2
"""Steps of benefit within a factor of two."""

_LEAST_BENEFIT = 1e-9


def benefit_class(benefit: float) -> int:
    """The class of a benefit: its log2 in steps of 1 / `CLASSES_PER_OCTAVE`, rounded down."""
    return math.floor(math.log2(max(benefit, _LEAST_BENEFIT)) * CLASSES_PER_OCTAVE)


def class_benefit(index: int) -> float:
    """The benefit that stands for a class."""
    return math.exp2(index / CLASSES_PER_OCTAVE)


class ClassedEviction(Eviction):
    """Evicts the least of recency plus weighed benefit; `weight` may be changed at any time."""

    def __init__(self, weight: float, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        """`ValueError` for a negative or infinite weight."""
        if not 0 <= weight < math.inf:
            raise ValueError(f"a weight of {weight}; a finite number, 0 or more, is right")
        self.weight = weight
        self._of_need = {need: _Classes() for need in sorted(needs, key=lambda need: need.value)}

    @abstractmethod
    def benefit(self, node: NodeView) -> float:
        """What keeping `node` saves, in any unit, more than 0."""

    def update(self, node: NodeView) -> None:
        """Move `node` to its class and age."""
        index = benefit_class(self.benefit(node))
        for need, classes in self._of_need.items():
            if need is Need.KV and node.num_children:
                classes.discard(node)
            else:
                classes.put(node, index)

    def discard(self, node: NodeView) -> None:
        """Forget `node`."""
        for classes in self._of_need.values():
            classes.discard(node)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The node of least S; `KeyError` for a need that the rule was not made for."""
        return self._of_need[need].least(self.weight, now_s)


class _Classes:
    """Queues by last hit, one for each class that has nodes."""

    __slots__ = ("_class_of", "_queues")

    def __init__(self) -> None:
        self._queues: dict[int, VictimQueue] = {}
        self._class_of: dict[NodeView, int] = {}

    def put(self, node: NodeView, index: int) -> None:
        if self._class_of.get(node, index) != index:
            self.discard(node)
        self._class_of[node] = index
        queue = self._queues.get(index)
        if queue is None:
            queue = self._queues[index] = VictimQueue()
        queue.put(node, node.last_hit_s)

    def discard(self, node: NodeView) -> None:
        index = self._class_of.pop(node, None)
        if index is not None:
            queue = self._queues[index]
            queue.discard(node)
            if not len(queue):
                del self._queues[index]

    def least(self, weight: float, now_s: float) -> NodeView | None:
        if not self._queues:
            return None
        heads = [(index, head) for index, queue in self._queues.items() if (head := queue.first()) is not None]
        oldest_s = min(head.last_hit_s for _, head in heads)
        span_s = (now_s - oldest_s) or 1.0
        lowest, highest = class_benefit(min(self._queues)), class_benefit(max(self._queues))
        spread = (highest - lowest) or 1.0

        def order(indexed: tuple[int, NodeView]) -> tuple[float, float, int]:
            index, head = indexed
            recency = (head.last_hit_s - oldest_s) / span_s
            return recency + weight * ((class_benefit(index) - lowest) / spread), head.last_hit_s, head.serial

        return min(heads, key=order)[1]
