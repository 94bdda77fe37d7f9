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
from enum import Enum

from marconi.policy.eviction.base import Eviction, Need, NodeView, Scope
from marconi.policy.eviction.queue import VictimQueue
from marconi.policy.lease import Lease


class _Tier(Enum):
    FIRST = "on probation"
    RANKED = "ranked by the rule"
    LAST = "beyond the rule's scope"


class TieredEviction(Eviction):
    """`rule`, with a tier before it and one after it."""

    scope = Scope.ANY

    def __init__(self, rule: Eviction) -> None:
        """`rule` knows no node yet."""
        self.rule = rule
        self._max_children = rule.scope.value
        self._tiers: dict[NodeView, _Tier] = {}
        """A node that only changes its tier is no loss to a rule that did not rank it."""
        self._first = VictimQueue()
        self._first_leaves = VictimQueue()
        """Those of `_first` whose eviction frees KV."""
        self._last = VictimQueue()

    def update(self, node: NodeView) -> None:
        """Put `node` into its tier."""
        num_children = node.num_children
        if node.on_probation:
            self._move(node, _Tier.FIRST)
            self._first.put(node, node.last_hit_s)
            if num_children:
                self._first_leaves.discard(node)
            else:
                self._first_leaves.put(node, node.last_hit_s)
        elif num_children > self._max_children:
            self._move(node, _Tier.LAST)
            self._last.put(node, node.last_hit_s)
        else:
            self._move(node, _Tier.RANKED)
            self.rule.update(node)

    def discard(self, node: NodeView) -> None:
        """Forget `node`'s place."""
        tier = self._tiers.pop(node, None)
        if tier is not None:
            self._leave(node, tier)
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

    def _move(self, node: NodeView, tier: _Tier) -> None:
        old = self._tiers.get(node)
        if old is not tier:
            self._tiers[node] = tier
            if old is _Tier.RANKED:
                self.rule.discard(node)
            elif old is not None:
                self._leave(node, old)

    def _leave(self, node: NodeView, tier: _Tier) -> None:
        if tier is _Tier.FIRST:
            self._first.discard(node)
            self._first_leaves.discard(node)
        elif tier is _Tier.LAST:
            self._last.discard(node)

    def arrived(self, lease: Lease, now_s: float) -> None:
        """As the rule."""
        self.rule.arrived(lease, now_s)

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """As the rule."""
        self.rule.admitted(nodes, lease, now_s)

    def evicting(self, node: NodeView, now_s: float) -> None:
        """As the rule."""
        self.rule.evicting(node, now_s)
