"""A radix tree over packed ids that carries recurrent states beside KV.

A state stands for all tokens up to one position and cannot be rolled back, so a prefix is reusable only where a state
is held, and KV below the deepest state of its path is dead. The tree therefore keeps no dead KV:

    1. a live node's parent is live;
    2. a live node without live children has a state;
    3. a live node without a state has several children, ghosts among them, or it is merged into its only one.

Evicting a node that has live children frees its state; evicting one that has none frees its state and its KV, and the
KV above that nothing can use any more. What is evicted stays as a *ghost* until enough younger ones are there, by
number (`max_ghosts`) or by tokens (`max_ghost_tokens`): a ghost's descendants are ghosts that are older, so the oldest
ghost never has children. What a host tier holds of it is remembered as long as it is there (`host.py`).

Every operation notes the nodes whose evictability, freed bytes or nearest shallower state may differ from before; the
tree's owner (`policy/hybrid_cache.py`) takes them with `take_changed` and ranks them anew. A lock on a node holds its
state and, as its ancestors then have a live child, all KV of its path.

Costs: matching and inserting are linear in the nodes on the path, eviction in what it frees and the nearest states
below; none depends on the size of the tree.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import count
from operator import attrgetter
from typing import NamedTuple

from marconi.tree.memory import Memory
from marconi.tree.node import ID_BYTES, NONE_BELOW, Node, common_bytes


class Match(NamedTuple):
    """How much of a path the tree knows. Counts are in tokens from the root."""

    checkpoint: Node
    """The deepest node with a state within the limit; the root if none."""
    num_live_tokens: int
    """Longest prefix whose KV is held."""
    num_seen_tokens: int
    """Longest prefix that is held or remembered."""
    diverges: bool
    """Whether a different continuation of the first `num_seen_tokens` is known."""
    num_span_tokens_left: int
    """Where the path diverges within a span: tokens of the span that it does not share; else 0."""
    ghost: Node | None
    """The evicted state that the request would have started from: the deepest ghost within the limit; None if none."""
    last: Node
    """The node in whose span, or at whose end, the path diverges from the tree; the root if no prefix is known."""
    hosted: Node | None = None
    """The deepest node within the limit whose state the host holds."""

    @property
    def source(self) -> Node | None:
        """The state that a request with this match starts from, locked while it runs; None if there is none."""
        return self.checkpoint if self.checkpoint.depth else None


class Freed(NamedTuple):
    """The memory that an eviction freed."""

    num_tokens: int
    num_states: int


class RadixTree:
    """Prefixes of packed ids, separately for each namespace.

    A unit, in which keys are split, is one id that stands for `unit_tokens` tokens (a block of a trace), or a page of
    `ids_per_unit` ids.
    """

    def __init__(
        self,
        unit_tokens: int = 1,
        max_ghosts: int = 0,
        ids_per_unit: int = 1,
        memory: Memory | None = None,
        max_ghost_tokens: int | None = None,
    ) -> None:
        """An empty tree; `ValueError` for a unit of less than one token or id, or a negative bound.

        Ghosts are bounded by their number and, unless that is None, by the tokens of their spans.
        """
        if unit_tokens < 1:
            raise ValueError(f"unit_tokens must be at least 1, got {unit_tokens}")
        if ids_per_unit < 1:
            raise ValueError(f"ids_per_unit must be at least 1, got {ids_per_unit}")
        if max_ghosts < 0:
            raise ValueError(f"max_ghosts must be at least 0, got {max_ghosts}")
        if max_ghost_tokens is not None and max_ghost_tokens < 0:
            raise ValueError(f"max_ghost_tokens must be at least 0, got {max_ghost_tokens}")
        self.unit_tokens = unit_tokens
        self.unit_bytes = ids_per_unit * ID_BYTES
        self.max_ghosts = max_ghosts
        self.max_ghost_tokens = max_ghost_tokens
        self.memory = memory
        self.host_memory: Memory | None = None
        """Notified of the KV and states of hosted nodes as `memory` is of live ones; set by `HostCopies`."""
        self.roots: dict[int, Node] = {}
        """By namespace; one that knows nothing has none."""
        self.ghosts: OrderedDict[Node, None] = OrderedDict()
        """Oldest first."""
        self.num_ghost_tokens = 0
        """Tokens in the spans of ghosts."""
        self.num_tokens = 0
        """Tokens whose KV is held."""
        self.num_states = 0
        self.num_nodes = 0
        """Live nodes, roots aside."""
        self.locked: set[Node] = set()
        """Nodes whose states running requests hold."""
        self._changed: list[Node] = []
        self._namespaces: dict[Node, int] = {}
        self._serials = count(1)

    def root(self, namespace: int = 0) -> Node:
        """The node of the empty prefix of a namespace; made if there is none."""
        if namespace not in self.roots:
            root = self.roots[namespace] = Node(b"", None, 0, next(self._serials))
            self._namespaces[root] = namespace
        return self.roots[namespace]

    def nodes(self) -> Iterator[Node]:
        """Every live node but the roots."""
        for root in self.roots.values():
            for node in root.walk():
                if node.is_live and node.parent is not None:
                    yield node

    def path_to(self, node: Node) -> tuple[bytes, int]:
        """The path that ends at `node`, and its name space."""
        keys, above = list[bytes](), node
        while above.parent is not None:
            keys.append(above.key)
            above = above.parent
        return b"".join(reversed(keys)), self._namespaces[above]

    def offset(self, num_tokens: int) -> int:
        """Where in a path, in bytes, its first `num_tokens` tokens end; `ValueError` inside a unit."""
        if num_tokens < 0 or num_tokens % self.unit_tokens:
            raise ValueError(f"num_tokens must be a multiple of {self.unit_tokens}, the unit, got {num_tokens}")
        return num_tokens // self.unit_tokens * self.unit_bytes

    def match(self, path: bytes, max_tokens: int, namespace: int = 0, start: Node | None = None) -> Match:
        """How much of `path` is known, and the deepest state at no more than `max_tokens` tokens.

        With `start`, a node with a state within `max_tokens`, `path` is what comes after it. All depths are from the
        root.
        """
        root = self.roots.get(namespace) if start is None else start
        node = best = root if root is not None else Node(b"", None, 0, 0)
        ghost: Node | None = None
        hosted: Node | None = None
        position, unit, unit_bytes = 0, self.unit_tokens, self.unit_bytes
        live, left = -1, 0
        while True:
            child = node.children.get(path[position : position + unit_bytes])
            if child is None:
                known, diverges, last = node.depth, bool(node.children), node
                break
            if live < 0 and not child.is_live:
                live = node.depth
            key = child.key
            if not path.startswith(key, position):
                shared = common_bytes(key, path, unit_bytes, 0, position)
                known, diverges = node.depth + shared // unit_bytes * unit, True
                left, last = child.depth - known, child
                break
            node = child
            position += len(key)
            if node.depth <= max_tokens:
                if node.has_state:
                    best = node
                elif not node.is_live:
                    ghost = node
                if node.has_copy:
                    hosted = node
        return Match(best, known if live < 0 else live, known, diverges, left, ghost, last, hosted)

    def num_known_tokens(self, path: bytes, namespace: int) -> int:
        """Tokens of `path` that a name space knows, as KV or as ghosts."""
        node, unit_bytes, position = self.roots[namespace], self.unit_bytes, 0
        while (child := node.children.get(path[position : position + unit_bytes])) is not None:
            if not path.startswith(child.key, position):
                position += common_bytes(child.key, path, unit_bytes, 0, position)
                break
            node = child
            position += len(child.key)
        return position // unit_bytes * self.unit_tokens

    def insert(
        self, path: bytes, checkpoints: Sequence[int], namespace: int = 0, start: Node | None = None
    ) -> list[Node]:
        """Hold `path` up to the last of `checkpoints` and a state at each; returns their nodes, in order.

        `checkpoints` are depths in tokens, rising, each at the end of a unit within the path; else `ValueError`.
        KV beyond the last of them would be dead and is not held. With `start`, a live node with a state, `path` is what
        comes after it and is paid for alone; depths are from the root all the same.
        """
        node = self.root(namespace) if start is None else start
        before, unit_bytes = node.depth, self.unit_bytes
        position = 0
        made: list[Node] = []
        for depth in checkpoints:
            num_units, rest = divmod(depth - before, self.unit_tokens)
            target = num_units * unit_bytes
            if rest or not position < target <= len(path):
                self.offset(depth)
                raise ValueError(f"checkpoints must rise within the path, got one at {depth} tokens")
            while position < target:
                child = node.children.get(path[position : position + unit_bytes])
                end = position if child is None else position + len(child.key)
                if child is None or not child.is_live or end > target or not path.startswith(child.key, position):
                    child = self._step(node, path, position, target)
                    end = position + len(child.key)
                    if not child.is_live:
                        self._revive(child)
                    if not node.has_state:
                        self._merge_upward(node)
                node, position = child, end
            made.append(node)
            if not node.has_state:
                self._give_state(node)
        return made

    def outline(self, path: bytes, depth: int, namespace: int = 0) -> Node:
        """The node at the end of the first `depth` tokens of `path`, for a copy of its state (`host.py`).

        What the device does not hold of the path is no ghost any more: the caller holds it on the host at once.
        """
        node, position, target = self.root(namespace), 0, self.offset(depth)
        while position < target:
            node = self._step(node, path, position, target)
            position += len(node.key)
        return node

    def lock(self, node: Node) -> None:
        """Keep a node with a state, and so the KV of its path; a root needs none."""
        assert node.has_state or node.parent is None, f"{node} has no state to lock"
        node.num_locks += 1
        if node.num_locks == 1:
            self.locked.add(node)
            self._changed.append(node)

    def unlock(self, node: Node) -> None:
        """Give back one lock."""
        assert node.num_locks > 0, f"{node} is not locked"
        node.num_locks -= 1
        if node.num_locks == 0:
            self.locked.remove(node)
            self._changed.append(node)

    def evict(self, node: Node) -> Freed:
        """Free a node's state and, if it has no live children, its KV and what becomes dead above."""
        assert node.is_live, f"{node} holds nothing"
        assert node.has_state, f"{node} has no state to evict"
        assert not node.num_locks, f"{node} is locked"
        node.has_state = False
        self.num_states -= 1
        self._changed.append(node)
        if self.memory is not None:
            self.memory.dropped_state(node)
        if node.live_children:
            self._note_nearest_below(node, node.checkpoint_depth_above)
            self._note_nearest_above(node)
            self._merge_upward(node)
            return Freed(0, 1)
        num_tokens, last_pass_s = self.num_tokens, node.last_pass_s
        above: Node | None = node
        while above is not None and above.parent is not None and not above.has_state and not above.live_children:
            last_pass_s = max(last_pass_s, above.last_pass_s)
            above = self._to_ghost(above)
        assert above is not None
        above.last_pass_s = max(last_pass_s, above.last_pass_s)
        self._changed.append(above)
        self._note_nearest_above(above)
        self._note_only_leaf(above)
        self.tidy(above)
        return Freed(num_tokens - self.num_tokens, 1)

    def tidy(self, node: Node) -> None:
        """Merge a node below which something was evicted, and forget ghosts that are too many."""
        self._merge_upward(node)
        self._forget_namespace(node)
        self._forget_ghosts()

    # Structure

    def _step(self, node: Node, path: bytes, position: int, target: int) -> Node:
        """The child of `node` on `path`, ending at `target` at the latest; made or split as needed, no ghost any more.

        It may not be live.
        """
        child = node.children.get(path[position : position + self.unit_bytes])
        if child is None:
            depth = node.depth + (target - position) // self.unit_bytes * self.unit_tokens
            child = Node(path[position:target], node, depth, next(self._serials))
            child.is_live = False
            if not node.children:
                node.children = {}
            node.children[child.key[: self.unit_bytes]] = child
            return child
        key = child.key
        size = len(key)
        if size > target - position or not path.startswith(key, position):
            size = min(size, target - position)
            if path[position : position + size] != key[:size]:
                size = min(size, common_bytes(key, path, self.unit_bytes, 0, position))
        if size < len(key):
            child = self._split(child, size)
        if not child.is_live and not child.is_hosted:
            self.ghosts.pop(child, None)
            self.num_ghost_tokens -= child.depth - node.depth
        return child

    def _split(self, node: Node, size: int) -> Node:
        """Cut the first `size` bytes of a node's span off into a node above it, which is returned."""
        parent = node.parent
        assert parent is not None
        depth = parent.depth + size // self.unit_bytes * self.unit_tokens
        upper = Node(node.key[:size], parent, depth, next(self._serials))
        upper.last_pass_s = node.last_pass_s
        if node.absences:
            num_above = bisect_right(node.absences, upper.depth, key=attrgetter("depth"))
            upper.absences, node.absences = node.absences[:num_above], node.absences[num_above:]
        parent.children[upper.key[: self.unit_bytes]] = upper
        node.key = node.key[size:]
        node.parent = upper
        upper.children = {node.key[: self.unit_bytes]: node}
        upper.is_live, upper.is_hosted = node.is_live, node.is_hosted
        if node.is_hosted:
            assert parent.hosted_children is not None
            del parent.hosted_children[node]
            parent.hosted_children[upper] = None
            upper.hosted_children = {node: None}
            if self.host_memory is not None:
                self.host_memory.split(upper, node)
        if node.is_live:
            del parent.live_children[node]
            parent.live_children[upper] = None
            upper.live_children, upper.num_children = {node: None}, 1
            self.num_nodes += 1
            self._changed.append(node)
            if self.memory is not None:
                self.memory.split(upper, node)
        return upper

    def _revive(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert parent.is_live
        node.is_live = True
        if not parent.live_children:
            parent.live_children = {}
        parent.live_children[node] = None
        parent.num_children += 1
        parent.freed_tokens = 0
        if parent.num_children == 2 and parent.parent is not None and not parent.has_state:
            self._note_only_leaf(next(iter(parent.live_children)))
        self.num_tokens += node.depth - parent.depth
        self.num_nodes += 1
        self._changed.append(parent)
        self._note_nearest_above(parent)
        if self.memory is not None:
            self.memory.held(node)

    def _to_ghost(self, node: Node) -> Node:
        """Make a live node without live children a ghost; returns its parent."""
        parent = node.parent
        assert parent is not None
        node.is_live, node.live_children = False, NONE_BELOW
        if not node.children:
            node.children = NONE_BELOW
        del parent.live_children[node]
        parent.num_children -= 1
        self.num_tokens -= node.depth - parent.depth
        self.num_nodes -= 1
        self._changed.append(node)
        if self.memory is not None:
            self.memory.dropped(node)
        if not node.is_hosted:
            self.remember(node)
        return parent

    def remember(self, node: Node) -> None:
        """Keep a node that no tier holds any more as a ghost, if there are any."""
        parent = node.parent
        assert parent is not None
        if self.max_ghosts:
            self.ghosts[node] = None
            self.num_ghost_tokens += node.depth - parent.depth
        else:
            del parent.children[node.key[: self.unit_bytes]]
            node.parent = None

    def _forget_namespace(self, root: Node) -> None:
        """Forget a root that nothing hangs from; other nodes stay."""
        if root.parent is None and not root.children and root in self._namespaces:
            del self.roots[self._namespaces.pop(root)]

    def _forget_ghosts(self) -> None:
        while len(self.ghosts) > self.max_ghosts or (
            self.max_ghost_tokens is not None and self.num_ghost_tokens > self.max_ghost_tokens
        ):
            ghost, _ = self.ghosts.popitem(last=False)
            parent = ghost.parent
            assert parent is not None
            self.num_ghost_tokens -= ghost.depth - parent.depth
            del parent.children[ghost.key[: self.unit_bytes]]
            ghost.parent = None
            self._merge_upward(parent)
            self._forget_namespace(parent)

    def _give_state(self, node: Node) -> None:
        node.has_state = True
        node.held_since_s = None
        if node.absences:
            node.present()
        self.num_states += 1
        self._changed.append(node)
        if node.live_children:
            self._note_nearest_below(node, node.depth)
        above = self._note_nearest_above(node)
        node.checkpoint_depth_above = 0 if above is None else above.depth
        node.freed_tokens = node.count_freed_tokens()

    def _merge_upward(self, node: Node) -> None:
        """Merge a live node without a state into its only child, if that is live; the child keeps its identity.

        Each tier must hold both or neither.
        """
        parent = node.parent
        if parent is None or node.has_state or len(node.children) != 1 or not node.is_live or not node.live_children:
            return
        (child,) = node.children.values()
        if node.has_copy or node.is_hosted is not child.is_hosted:
            return
        is_hosted = node.is_hosted
        if is_hosted:
            assert parent.hosted_children is not None
            del parent.hosted_children[node]
            parent.hosted_children[child] = None
            node.is_hosted, node.hosted_children = False, None
        child.key = node.key + child.key
        if node.absences:
            child.absences = node.absences + (child.absences or [])
        child.parent = parent
        parent.last_pass_s = max(parent.last_pass_s, node.last_pass_s)
        parent.children[child.key[: self.unit_bytes]] = child
        del parent.live_children[node]
        parent.live_children[child] = None
        node.is_live = False
        node.parent = None
        # `live_children` stays: a rule that hears of the node may ask whether something continued it.
        node.children, node.key = NONE_BELOW, b""
        self.num_nodes -= 1
        self._changed.append(node)
        self._changed.append(child)
        if self.memory is not None:
            self.memory.joined(node, child)
        if is_hosted and self.host_memory is not None:
            self.host_memory.joined(node, child)

    # What changed

    def take_changed(self) -> list[Node]:
        """The nodes that may differ since the last call, in the order in which they changed, some of them repeated."""
        changed, self._changed = self._changed, []
        return changed

    def _note_nearest_above(self, node: Node) -> Node | None:
        """Note the nearest state above, which is returned: the next deeper one differs."""
        above = node.parent
        while above is not None and not above.has_state:
            above = above.parent
        if above is not None:
            self._changed.append(above)
        return above

    def _note_nearest_below(self, node: Node, depth: int) -> None:
        """Note the nearest states below: the nearest shallower one is at `depth` now."""
        stack = list(node.live_children)
        while stack:
            below = stack.pop()
            if below.has_state:
                below.checkpoint_depth_above = depth
                below.freed_tokens = below.count_freed_tokens()
                self._changed.append(below)
            else:
                stack.extend(below.live_children)

    def _note_only_leaf(self, node: Node) -> None:
        """Note the state that a chain of single children leads to, `node` included: what its eviction frees differs."""
        while node.num_children == 1 and node.parent is not None and not node.has_state:
            (node,) = node.live_children
        if node.has_state:
            node.freed_tokens = node.count_freed_tokens()
            self._changed.append(node)
