"""The wishes of name spaces for their own states: to retain them for a while, or to evict them first.

    One name space's wishes cost the others nothing: whatever they spare is paid with other states of that name space.

Eviction chooses its victim as always. Where a wish of the victim's name space speaks against it, another state of the
same name space is evicted in its place (`HybridCache.evict`):

    the victim is any state of a name space that has demoted some     the one demoted first
    the victim is retained                                            the state of its name space that is next to evict
                                                                      and not retained; if none is found, the victim

A retained state that has been paid for trades places. If n states of others stood between it and the state that paid,
it is *set aside* for the next n evictions and then is a victim like any other, which pays again while it is retained.
A payment that frees fewer tokens than the retained state would have is not enough, so that the state pays again before
it is set aside. The others are therefore evicted in the same order, no earlier, than without the wish, as long as all
requests are the same.

Seconds and counts are bounded: `MAX_RETAIN_S` from when a wish is made, `MAX_RETAINED` states and `MAX_DEMOTED` a name
space. A wish ends with its state, and a demotion also when a request resumes from the state or leaves it again. All
times are passed in, in seconds.
"""

from collections.abc import Iterator, Set
from typing import Final, NamedTuple

from marconi.policy.base import Need, NodeView
from marconi.policy.eviction.order import VictimQueue
from marconi.tree import Node

MAX_RETAIN_S: Final = 3600.0
MAX_RETAINED: Final = 64
"""States a name space."""
MAX_DEMOTED: Final = 64
"""States a name space."""
MAX_PASSED: Final = 32
"""States of others that are looked past for the one that pays."""
MAX_LOOKED_AT: Final = 256
"""Nodes of its name space that are looked at where none pays among those; the one that was used longest ago does."""


class _Wishes:
    """The wishes of one name space."""

    __slots__ = ("debts", "demoted", "retained_until_s")

    def __init__(self) -> None:
        self.retained_until_s: dict[Node, float] = {}
        self.demoted: dict[Node, None] = {}
        """First to be evicted first."""
        self.debts: dict[Node, _Debt] = {}
        """By retained state that has been paid for in part."""


class _Debt(NamedTuple):
    """The payments for a retained state so far."""

    num_tokens: int
    """Tokens that were freed in its place."""
    num_passed: int
    """States of others that stood between it and the first that paid."""


class Retention:
    """The wishes of all name spaces, and the retained states that are set aside. False if there are none."""

    def __init__(self) -> None:
        self._of: dict[Node, _Wishes] = {}
        """By root."""
        self._roots: dict[Node, Node] = {}
        """The root above each state with a wish."""
        self._aside = VictimQueue()
        """By their turn: how many evictions there have been when they are victims again."""
        self._num_evictions = 0

    def __bool__(self) -> bool:
        return bool(self._roots) or bool(self._aside)

    def retain(self, node: Node, until_s: float, now_s: float) -> bool:
        """Retain `node` until `until_s`; False if its name space retains `MAX_RETAINED` states already."""
        root = root_of(node)
        wishes = self._of.setdefault(root, _Wishes())
        retained = wishes.retained_until_s
        if node not in retained and len(retained) >= MAX_RETAINED:
            for each in [each for each, end_s in retained.items() if end_s <= now_s]:
                self._drop(each)
            if len(retained) >= MAX_RETAINED:
                return False
        # The last of them may have been dropped.
        self._of[root], self._roots[node] = wishes, root
        retained[node] = min(until_s, now_s + MAX_RETAIN_S)
        wishes.demoted.pop(node, None)
        return True

    def demote(self, node: Node) -> bool:
        """Evict `node` before all others of its name space; False if that has demoted `MAX_DEMOTED` already."""
        root = root_of(node)
        wishes = self._of.get(root)
        if wishes is not None and node not in wishes.demoted and len(wishes.demoted) >= MAX_DEMOTED:
            return False
        self._drop(node)
        self._of.setdefault(root, _Wishes()).demoted[node] = None
        self._roots[node] = root
        return True

    def used(self, node: Node) -> None:
        """A request has resumed from `node`, or left its state again: it is demoted no longer."""
        root = self._roots.get(node)
        if root is not None and node in self._of[root].demoted:
            self._drop(node)

    def gone(self, node: Node) -> None:
        """The state of `node` is held no longer."""
        self._drop(node)
        self._aside.discard(node)

    def demoted(self, root: Node) -> Iterator[Node]:
        """The demoted states of a name space, the first to be evicted first."""
        wishes = self._of.get(root)
        return iter(()) if wishes is None else iter(wishes.demoted)

    def is_demoted(self, node: Node) -> bool:
        """Whether `node` is demoted."""
        root = self._roots.get(node)
        return root is not None and node in self._of[root].demoted

    def is_retained(self, node: Node, now_s: float) -> bool:
        """Whether `node` is retained."""
        root = self._roots.get(node)
        return root is not None and self._of[root].retained_until_s.get(node, now_s) > now_s

    def evicted(self) -> None:
        """A victim is evicted as it was chosen."""
        self._num_evictions += 1

    def take_back(self) -> Iterator[Node]:
        """Take the states whose turn has come, and yield them."""
        while (entry := self._aside.first_entry()) is not None:
            turn, _, node = entry
            assert isinstance(node, Node)
            assert not isinstance(turn, tuple)
            if turn > self._num_evictions:
                return
            self._aside.discard(node)
            yield node

    def paid(self, node: Node, num_tokens: int, num_passed: int) -> bool:
        """A state that frees `num_tokens` tokens is evicted in place of `node`; `num_passed` stood between them.

        Returns whether that is enough: `node` is set aside.
        """
        debts = self._of[self._roots[node]].debts
        before = debts.pop(node, _Debt(0, num_passed))
        debt = _Debt(before.num_tokens + num_tokens, before.num_passed)
        if debt.num_tokens < node.freed_tokens:
            debts[node] = debt
            return False
        self._num_evictions += 1
        self._aside.put(node, self._num_evictions + debt.num_passed)
        return True

    def check_invariants(self, held: Set[Node]) -> None:
        """Raise `AssertionError` unless every wish is for a state that is `held`, and those set aside say so."""
        assert set(self._aside) == {node for node in held if node.set_aside}
        assert self._roots.keys() <= held, f"{self._roots.keys() - held}: a wish outlives its state"
        assert set(self._of) == set(self._roots.values())
        for root, wishes in self._of.items():
            retained, demoted = wishes.retained_until_s.keys(), wishes.demoted.keys()
            assert retained | demoted == {node for node, above in self._roots.items() if above is root}
            assert not retained & demoted
            assert wishes.debts.keys() <= retained

    def _drop(self, node: Node) -> None:
        """Forget the wish for `node`, if there is one; if the state is set aside, its turn comes next."""
        root = self._roots.pop(node, None)
        if root is None:
            return
        wishes = self._of[root]
        wishes.retained_until_s.pop(node, None)
        wishes.demoted.pop(node, None)
        wishes.debts.pop(node, None)
        if node in self._aside:
            self._aside.put(node, 0)
        if not wishes.retained_until_s and not wishes.demoted:
            del self._of[root]


def root_of(node: Node) -> Node:
    """The root above `node`: its name space's."""
    while node.parent is not None:
        node = node.parent
    return node


def is_ranked(node: NodeView) -> bool:
    """True if the rule, or its scope, gives `node` its place in the order."""
    return node.leaving is None and not node.set_aside and node.first_waiting is None


def may_pay(node: Node, need: Need) -> bool:
    """True if `node` may be evicted in place of another state when `need` is short."""
    serves = need is not Need.KV or not node.num_children
    return node.has_state and not node.num_locks and serves and is_ranked(node)


def held_below(root: Node) -> Iterator[Node]:
    """The first `MAX_LOOKED_AT` of the live nodes below `root`, one path after the other, the oldest first."""
    stack = [iter(root.live_children)]
    for _ in range(MAX_LOOKED_AT):
        while (node := next(stack[-1], None)) is None:
            stack.pop()
            if not stack:
                return
        stack.append(iter(node.live_children))
        yield node
