"""Three tiers around an eviction rule: what is on probation goes first, what the rule does not rank goes last.

A server writes a state near the end of every prompt on the chance that the prompt comes again or is gone on from. Such
a state is *on probation*: until a request has started from it, it goes before anything else, the oldest first. A state
beyond the rule's scope (an interior node on the way to several others) is a victim only where the rule has none left:
a server counts every state that is not in use as one that it can have, so there has to be a way to it.

    probation, oldest first   ->   the rule's own order   ->   beyond the rule's scope, oldest hit first

Who is on probation is a fact of the node; the tree sees to it that such a state counts for nothing in the worth of
others, before which it would go. A node leaves probation when it is hit or when another request leaves its own state
there (`served.py`).
"""

from collections.abc import Sequence

from marconi.policy.eviction.base import Eviction, Need, NodeView, Scope
from marconi.policy.eviction.queue import VictimQueue
from marconi.policy.lease import Lease


class TieredEviction(Eviction):
    """`rule`, with a tier before it and one after it."""

    scope = Scope.ANY

    def __init__(self, rule: Eviction) -> None:
        """`rule` knows no node yet."""
        self.rule = rule
        self._ranked: set[NodeView] = set()
        """Those that `rule` ranks: a node that only changes its tier is no loss to a rule that did not rank it."""
        self._first = VictimQueue()
        self._first_leaves = VictimQueue()
        """Those of `_first` whose eviction frees KV."""
        self._last = VictimQueue()

    def update(self, node: NodeView) -> None:
        """Put `node` into its tier."""
        if node.on_probation:
            self._unrank(node)
            self._last.discard(node)
            self._first.put(node, node.last_hit_s)
            if node.num_children:
                self._first_leaves.discard(node)
            else:
                self._first_leaves.put(node, node.last_hit_s)
            return
        self._first.discard(node)
        self._first_leaves.discard(node)
        if node.num_children > self.rule.scope.value:
            self._unrank(node)
            self._last.put(node, node.last_hit_s)
        else:
            self._last.discard(node)
            self._ranked.add(node)
            self.rule.update(node)

    def discard(self, node: NodeView) -> None:
        """Forget `node`'s place."""
        for queue in (self._first, self._first_leaves, self._last):
            queue.discard(node)
        self._ranked.discard(node)
        self.rule.discard(node)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The first of the first tier that has any."""
        node = self.victim_on_probation(need)
        if node is None:
            node = self.rule.victim(need, now_s)
        if node is None and need is not Need.KV:
            node = self._last.first()
        return node

    @property
    def num_on_probation(self) -> int:
        """States on probation that may go."""
        return len(self._first)

    def victim_on_probation(self, need: Need) -> NodeView | None:
        """The oldest on probation that helps `need`."""
        return (self._first_leaves if need is Need.KV else self._first).first()

    def _unrank(self, node: NodeView) -> None:
        if node in self._ranked:
            self._ranked.remove(node)
            self.rule.discard(node)

    def arrived(self, lease: Lease, now_s: float) -> None:
        """As the rule."""
        self.rule.arrived(lease, now_s)

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """As the rule."""
        self.rule.admitted(nodes, lease, now_s)

    def evicting(self, node: NodeView, now_s: float) -> None:
        """As the rule."""
        self.rule.evicting(node, now_s)
