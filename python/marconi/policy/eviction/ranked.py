"""Rules whose worth of a node changes only when the node is reported: two queues, one for each kind of need.

`leaves` serves `Need.KV`; `states` holds every node in the scope and serves `Need.STATE` and, in one pool,
`Need.BYTES`. A rule gives `worth`, in any unit; the least is evicted first.
"""

from abc import abstractmethod
from collections.abc import Sequence

from marconi.policy.base import Eviction, Need, NodeView, for_states
from marconi.policy.eviction.order import Key, VictimQueue
from marconi.policy.forecast.hazard import Floats


class RankedEviction(Eviction):
    """Evicts the node of least worth."""

    def __init__(self, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        self._queues = {need: VictimQueue() for need in sorted(needs, key=lambda need: need.value)}
        self._of_leaves = self._queues.get(Need.KV)
        self._of_all = [queue for need, queue in self._queues.items() if need is not Need.KV]

    @abstractmethod
    def worth(self, node: NodeView) -> Key:
        """The worth of keeping `node`."""

    def worth_of_kv(self, node: NodeView) -> Key:
        """The worth of keeping a leaf when KV is short; the same unless a rule says otherwise."""
        return self.worth(node)

    def update(self, node: NodeView) -> None:
        """Rank `node` anew."""
        for queue in self._of_all:
            queue.put(node, self.worth(node))
        if self._of_leaves is not None:
            if node.num_children:
                self._of_leaves.discard(node)
            else:
                self._of_leaves.put(node, self.worth_of_kv(node))

    def discard(self, node: NodeView) -> None:
        """Forget `node`."""
        for queue in self._queues.values():
            queue.discard(node)

    def worths(self, nodes: Sequence[NodeView], now_s: float) -> Floats:
        """Worths as they were when the nodes were reported."""
        return for_states(self._queues).keys(nodes)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The node of least worth; `KeyError` for a need that the rule was not made for."""
        return self._queues[need].first()
