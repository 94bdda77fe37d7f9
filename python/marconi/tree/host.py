"""Copies of KV and states in the host's memory, on the nodes of the tree whose device part is in `radix.py`.

A prefix may be held on the device, on the host, on both, or on neither (a ghost). The host keeps to the device's rules,
so nothing that it holds is dead:

    1. a hosted node's parent is hosted
    2. a hosted node without hosted children has a copy of its state

A copy therefore stands for a whole path: it can be loaded whatever the device has evicted meanwhile. Shared parts of
paths exist once. A copy is made of what the device holds (`hold`) or a store has (`adopt`), loaded by
inserting its path again (`RadixTree.insert`), and stays until it is dropped. Dropping it frees its state, and the KV
that no other copy needs.

Every operation notes the copies whose freed tokens, children or nearest shallower state may differ; whoever ranks them
takes them with `take_changed`.
"""

from marconi.tree.memory import Memory
from marconi.tree.node import HostCopy, Node, common_bytes
from marconi.tree.radix import Freed, RadixTree


class HostCopies:
    """The copies of a tree that the host holds."""

    def __init__(self, tree: RadixTree, memory: Memory | None = None) -> None:
        """`memory` is notified of nodes held and dropped, as the device's is; the caller of `hold` fills the copy."""
        tree.host_memory = memory
        self.num_tokens = 0
        """Tokens whose KV is held."""
        self.num_states = 0
        self._changed: list[HostCopy] = []
        self._locked: dict[HostCopy, None] = {}
        self._tree = tree
        self._memory = memory

    def hold(self, node: Node) -> HostCopy:
        """Copy the state of `node`, which the device holds, and the KV of its path."""
        assert node.has_state, f"{node} has no state to copy"
        return self._hold(node)

    def adopt(self, path: bytes, depth: int, namespace: int, now_s: float) -> HostCopy:
        """Hold a copy of a state after `depth` tokens of `path`, and of their KV; the device need not have them."""
        node = self._tree.outline(path, depth, namespace)
        if node.held_since_s is None:
            node.last_hit_s = node.last_pass_s = now_s
        return self._hold(node)

    def num_hosted_tokens(self, path: bytes, depth: int, namespace: int) -> int:
        """How many of the first `depth` tokens of `path` the host holds the KV of."""
        tree = self._tree
        node, position, target = tree.roots.get(namespace), 0, tree.offset(depth)
        while node is not None and position < target:
            node = node.children.get(path[position : position + tree.unit_bytes])
            if node is None or not node.is_hosted:
                break
            shared = common_bytes(node.key, path[position : min(position + len(node.key), target)], tree.unit_bytes)
            position += shared
            if shared < len(node.key):
                break
        return position // tree.unit_bytes * tree.unit_tokens

    def _hold(self, node: Node) -> HostCopy:
        copy = node.host_copy = node.host_copy or HostCopy(node)
        self.num_states += not node.has_copy
        node.has_copy = True
        above = node
        made: list[Node] = []
        while above.parent is not None and not above.is_hosted:
            above.is_hosted = True
            self.num_tokens += above.depth - above.parent.depth
            if above.parent.hosted_children is None:
                above.parent.hosted_children = {}
            self._note_only_leaf(above.parent)
            above.parent.hosted_children[above] = None
            if self._memory is not None:
                self._memory.held(above)
            made.append(above)
            above = above.parent
        self._note(above)
        self._changed.append(copy)
        self._note_nearest_below(node)
        for each in (*made[1:], above):
            self._tree.tidy(each)
        return copy

    def lock(self, copy: HostCopy) -> None:
        """Keep `copy` while it is loaded."""
        copy.num_locks += 1
        self._locked[copy] = None
        self._changed.append(copy)

    def unlock(self, copy: HostCopy) -> None:
        """Give back one lock."""
        assert copy.num_locks > 0, f"{copy} is not locked"
        copy.num_locks -= 1
        if not copy.num_locks:
            del self._locked[copy]
        self._changed.append(copy)

    @property
    def locked(self) -> Freed:
        """The tokens and states that no drop can free at the moment."""
        num_tokens, seen = 0, set[Node]()
        for copy in self._locked:
            node = copy.node
            while node.parent is not None and node not in seen:
                seen.add(node)
                num_tokens += node.depth - node.parent.depth
                node = node.parent
        return Freed(num_tokens, len(self._locked))

    def drop(self, copy: HostCopy) -> Freed:
        """Free a copy and the KV that no other needs."""
        node, tree = copy.node, self._tree
        assert node.has_copy, f"{copy} is dropped already"
        assert not copy.num_locks, f"{copy} is locked"
        node.has_copy, copy.leaving = False, None
        self.num_states -= 1
        self._changed.append(copy)
        if self._memory is not None:
            self._memory.dropped_state(node)
        self._note_nearest_below(node)
        num_tokens, above, unhosted = self.num_tokens, node, []
        while above.parent is not None and not above.has_copy and not above.hosted_children:
            parent = above.parent
            assert parent.hosted_children is not None
            above.is_hosted = False
            del parent.hosted_children[above]
            self.num_tokens -= above.depth - parent.depth
            if self._memory is not None:
                self._memory.dropped(above)
            unhosted.append(above)
            if not above.is_live:
                tree.remember(above)
            above = parent
        self._note(above)
        self._note_only_leaf(above)
        for each in (*unhosted, above):
            tree.tidy(each)
        return Freed(num_tokens - self.num_tokens, 1)

    def use(self, copy: HostCopy) -> None:
        """`copy` was used on either tier, or the device has taken or evicted its state: nothing is decided of it."""
        copy.leaving = None
        self._changed.append(copy)

    def leave(self, copy: HostCopy, place: int) -> None:
        """Drop `copy` before all others, in rising order of `place`, unless it is used first."""
        copy.leaving = place
        self._changed.append(copy)

    def take_changed(self) -> list[HostCopy]:
        """The copies that may differ since the last call, in the order in which they changed, some of them repeated."""
        changed, self._changed = self._changed, []
        return changed

    def _note(self, node: Node) -> None:
        if node.has_copy:
            assert node.host_copy is not None
            self._changed.append(node.host_copy)

    def _note_only_leaf(self, node: Node) -> None:
        """Note the copy that a chain of single children leads to: what it frees differs."""
        while node.hosted_children is not None and len(node.hosted_children) == 1 and not node.has_copy:
            (node,) = node.hosted_children
            self._note(node)

    def _note_nearest_below(self, node: Node) -> None:
        """Note the nearest copies below: their distance to a shallower state differs."""
        stack = list(node.hosted_children or ())
        while stack:
            below = stack.pop()
            self._note(below)
            if not below.has_copy:
                stack.extend(below.hosted_children or ())
