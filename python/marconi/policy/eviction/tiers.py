"""What surrounds a rule's own order: states that were chosen ahead go first, what the queue is about to use goes last.

A state beyond the rule's scope (an interior node on the way to several others) is a victim only where the rule has none
left: a server counts every state that is not in use as one that it can have, so there has to be a way to it. A state
that a waiting request would start from needs no forecast: of these the one that is used last goes first (Belady's
rule).

    leaving, as chosen  ->  the rule's own order  ->  beyond the rule's scope, oldest hit first
                                                  ->  awaited, last in the queue first

Who is awaited is a fact of the node, until the requests have left the queue (`waiting.py`). Who copies what is going to
be evicted before it is (`write_behind.py`) asks for the next victim ahead, and says of it that it is *leaving*: those
go first, in the order in which they were chosen, until a request starts from one.
"""

from collections.abc import Sequence

from marconi.policy.base import Eviction, Need, NodeView, PlannedState, Scope
from marconi.policy.eviction.queue import Key, VictimQueue
from marconi.policy.request import Lease


class _Tier:
    """Nodes outside the rule's order."""

    __slots__ = ("all", "leaves")

    def __init__(self) -> None:
        self.all = VictimQueue()
        self.leaves = VictimQueue()
        """Those whose eviction frees KV."""

    def put(self, node: NodeView, key: Key) -> None:
        """Add `node`, or move it."""
        self.all.put(node, key)
        if node.num_children:
            self.leaves.discard(node)
        else:
            self.leaves.put(node, key)

    def discard(self, node: NodeView) -> None:
        """Remove `node`."""
        self.all.discard(node)
        self.leaves.discard(node)

    def first(self, need: Need) -> NodeView | None:
        """The first that helps `need`."""
        return (self.leaves if need is Need.KV else self.all).first()


class _Leaving(_Tier):
    """Nodes whose KV is counted, as it is when the tree tells of a change."""

    __slots__ = ("_freed_tokens", "num_tokens")

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0
        self._freed_tokens: dict[NodeView, int] = {}

    def put(self, node: NodeView, key: Key) -> None:
        super().put(node, key)
        num_tokens = node.freed_tokens
        self.num_tokens += num_tokens - self._freed_tokens.get(node, 0)
        self._freed_tokens[node] = num_tokens

    def discard(self, node: NodeView) -> None:
        super().discard(node)
        self.num_tokens -= self._freed_tokens.pop(node, 0)


class TieredEviction(Eviction):
    """`rule`, with a tier before it and two after it."""

    scope = Scope.ANY

    def __init__(self, rule: Eviction) -> None:
        """`rule` knows no node yet."""
        self.rule = rule
        self._max_children = rule.scope.value
        self._leaving = _Leaving()
        self._beyond_scope = _Tier()
        self._awaited = _Tier()
        self._tiers: dict[NodeView, _Tier | None] = {}
        """Tier of each node; None for those that the rule ranks."""

    def update(self, node: NodeView) -> None:
        """Put `node` into its tier."""
        tier, key = self._tier_of(node)
        self._move(node, tier)
        if tier is None:
            self.rule.update(node)
        else:
            tier.put(node, key)

    def discard(self, node: NodeView) -> None:
        """Forget `node`'s place."""
        tier = self._tiers.pop(node, None)
        if tier is not None:
            tier.discard(node)
        self.rule.discard(node)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The first of the first tier that has any."""
        return self._leaving.first(need) or self.next_to_leave(need, now_s) or self._awaited.first(need)

    def next_to_leave(self, need: Need, now_s: float) -> NodeView | None:
        """The victim behind those that are leaving already, unless a request awaits it."""
        return self.rule.victim(need, now_s) or self._beyond_scope.first(need)

    @property
    def num_leaving(self) -> int:
        """States that are leaving."""
        return len(self._leaving.all)

    @property
    def num_leaving_tokens(self) -> int:
        """Tokens whose KV goes with those that are leaving; what goes with several of them alone is not counted."""
        return self._leaving.num_tokens

    @property
    def num_awaited(self) -> int:
        """States that waiting requests would start from, and that may go after all others."""
        return len(self._awaited.all)

    def _tier_of(self, node: NodeView) -> tuple[_Tier | None, Key]:
        """The tier of `node`, None if the rule ranks it, and its place there."""
        if node.first_waiting is not None:
            return self._awaited, -node.first_waiting
        if node.leaving is not None:
            return self._leaving, node.leaving
        return self._beyond_scope if node.num_children > self._max_children else None, node.last_hit_s

    def _move(self, node: NodeView, tier: _Tier | None) -> None:
        """`node` is in `tier` from now on; None is the rule's order."""
        was_known, old = node in self._tiers, self._tiers.get(node)
        self._tiers[node] = tier
        if old is tier:
            return
        if old is not None:
            old.discard(node)
        elif was_known:
            self.rule.discard(node)

    def outranks(self, planned: PlannedState, victim: NodeView, need: Need, now_s: float) -> bool:
        """As the rule says of what it ranks."""
        return self._tiers.get(victim) is not None or self.rule.outranks(planned, victim, need, now_s)

    def arrived(self, lease: Lease, now_s: float) -> None:
        """Tell the rule."""
        self.rule.arrived(lease, now_s)

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """Tell the rule."""
        self.rule.admitted(nodes, lease, now_s)

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Tell the rule."""
        self.rule.evicting(node, now_s)
