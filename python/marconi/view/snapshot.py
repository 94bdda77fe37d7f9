"""A tree as columns: one list a fact, one entry a node, in preorder, siblings in the order of their parent's children.

    parent   index of the parent; -1 for the root of a namespace
    depth    tokens from the root to the node's end
    tokens   tokens of its span
    kind     sum of `NodeKind`: live 1, state 2, KV on the host 4, state on the host 8, locked 16, ghost 32
    role     index in `ROLES` of its state, on either tier: none, way, prompt, answer, branch
    uses     requests that started from its state
    last_s   time in seconds when a request last ran through it or started from it
    worth    where its state stands in the order of eviction, in hundredths: 0 for the next victim, 100 for the last;
             -1 where it has no place in it (`standing.py`)
    hash     CRC-32 of its prefix, by which the prefix of a request is found (`prefix_hash`); `UNKNOWN` where the walk
             had hashed enough

Neither tokens nor text are in it. A hash of few tokens can be inverted by trial, as any hash without a key.

A walk is done in slices, between which the tree may change (`Walk.advance`). A node that was removed meanwhile is
skipped, its descendants are not; a node that was split is found as the two that it has become. Every entry is as it was
when its slice was taken. The hash of a node never changes, as its prefix does not: a `Walk` takes over those that the
walk before it computed, and costs some microseconds a node. Hashing all of a large tree takes as long as the rest of
its first walk, so a walk may be given a number of bytes to hash: what is left is known after a few walks more.
"""

import math
from enum import IntFlag
from typing import Final
from zlib import crc32

import msgspec
import numpy as np

from marconi.tree import Node, RadixTree
from marconi.view.standing import UNRANKED, Standing

ROLES: Final = ("none", "way", "prompt", "answer", "branch")
"""No state; left on the way; near the end of a prompt; near the end of an answer; several continuations."""
_SLICE_NODES: Final = 1 << 16
_NONE, _WAY, _PROMPT, _ANSWER, _BRANCH = range(len(ROLES))
_NO_PARENT: Final = -1
UNKNOWN: Final = -1
"""In place of a hash that is not computed yet."""
MAX_HASHED_BYTES: Final = 8 << 20
"""Bytes that a walk through a running server's tree hashes: some seven milliseconds."""


class NodeKind(IntFlag):
    """The memory that a node holds."""

    LIVE = 1
    """The device holds the KV of its span."""
    STATE = 2
    """The device holds its state."""
    HOST_KV = 4
    HOST_STATE = 8
    LOCKED = 16
    """A running request uses its state."""
    GHOST = 32
    """No tier holds the KV of its span."""


class Columns(msgspec.Struct, frozen=True):
    """The nodes of a tree, roots included; the module describes each column."""

    parent: list[int]
    depth: list[int]
    tokens: list[int]
    kind: list[int]
    role: list[int]
    uses: list[int]
    last_s: list[float]
    worth: list[int]
    hash: list[int]


def prefix_hash(path: bytes, namespace: int = 0) -> int:
    """The hash of the prefix `path`, packed ids, in a namespace."""
    return crc32(path, _start(namespace))


def hash_of(node: Node, namespace: int) -> int:
    """The hash of the prefix of `node`, which is in the tree of a namespace; linear in its depth."""
    keys: list[bytes] = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    return prefix_hash(b"".join(reversed(keys)), namespace)


class PrefixHashes:
    """Hashes of the prefixes of a tree's nodes, each computed once, by the serial number of its node."""

    __slots__ = ("_tree", "known")

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self.known: dict[int, int] = {}
        """Hashes by serial number; a walk leaves those of the nodes that it has found."""

    def of(self, node: Node) -> int:
        """The hash of the prefix of `node`, which is in the tree."""
        missing = []
        above: Node | None = node
        while above is not None and above.serial not in self.known:
            missing.append(above)
            above = above.parent
        found = 0 if above is None else self.known[above.serial]
        for each in reversed(missing):
            found = _start(self._tree.path_to(each)[1]) if each.parent is None else crc32(each.key, found)
            self.known[each.serial] = found
        return found


class Walk:
    """One walk through a tree, in slices."""

    def __init__(
        self,
        tree: RadixTree,
        hashes: PrefixHashes | None = None,
        max_hashed_bytes: float = math.inf,
        standing: Standing | None = None,
    ) -> None:
        """Begin at the roots of `tree`; `hashes` are those of the same tree.

        No further node is hashed once `max_hashed_bytes` of spans are. Without `standing`, no state has a worth.
        """
        self._standing = standing
        self._worth: list[int] | None = None
        self._num_bytes_left = max_hashed_bytes
        self._hashes = PrefixHashes(tree) if hashes is None else hashes
        for namespace, root in tree.roots.items():
            self._hashes.known.setdefault(root.serial, _start(namespace))
        self._stack = [*reversed(tree.roots.values())]
        """Nodes to visit, the next one last. Two lists of what exists anyway: tuples would be the collector's work."""
        self._above = [_NO_PARENT] * len(self._stack)
        """The index of the parent of each."""
        self._nodes: list[Node] = []
        self._serials: list[int] = []
        self._columns = Columns([], [], [], [], [], [], [], [], [])
        self._kept: dict[int, int] = {}
        """The hashes of the nodes that were visited, by serial number: a large tree's take long to collect at once."""

    def advance(self, max_nodes: int) -> bool:
        """Visit up to `max_nodes` further nodes, removed ones included; True once the walk is done.

        States are ranked once all nodes are visited, by a call of its own if those are more than `max_nodes`.
        """
        if self._stack:
            self._visit(max_nodes)
            if self._stack or len(self._nodes) > max_nodes:
                return False
        if self._worth is not None:
            return True
        unranked = [UNRANKED] * len(self._nodes)
        self._worth = unranked if self._standing is None else self._standing.hundredths(self._serials)
        return len(self._nodes) <= max_nodes

    def _visit(self, max_nodes: int) -> None:
        stack, aboves, nodes = self._stack, self._above, self._nodes
        known, hash_of = self._hashes.known, self._hashes.of
        serials, columns = self._serials, self._columns
        parents, depths, num_tokens, kinds = columns.parent, columns.depth, columns.tokens, columns.kind
        roles, uses, last_s, hashes = columns.role, columns.uses, columns.last_s, columns.hash
        num_bytes_left, begin = self._num_bytes_left, len(nodes)
        for _ in range(max_nodes):
            if not stack:
                break
            node, above = stack.pop(), aboves.pop()
            if above >= 0 and node.parent is not nodes[above]:
                moved = self._present(node, above)
                if moved is None:
                    continue
                node = moved
            copy, children = node.host_copy, node.children
            has_copy = copy is not None and copy.is_held
            kind = 1 if node.is_live else 0 if node.is_hosted else 32
            role = _NONE
            if node.has_state or has_copy:
                kind += (2 if node.has_state else 0) + (8 if has_copy else 0)
                left_by = node.left_by
                if len(children) > 1:
                    role = _BRANCH
                elif left_by is not None:
                    role = _PROMPT if node.depth <= left_by.num_prompt_tokens else _ANSWER
                else:
                    role = _WAY
            if node.is_hosted:
                kind += 4
            if node.num_locks:
                kind += 16
            serial, depth, hit_s, pass_s = node.serial, node.depth, node.last_hit_s, node.last_pass_s
            found = known.get(serial)
            index = len(nodes)
            nodes.append(node)
            serials.append(serial)
            parents.append(above)
            depths.append(depth)
            num_tokens.append(depth - depths[above] if above >= 0 else depth)
            kinds.append(kind)
            roles.append(role)
            uses.append(node.num_hits)
            last_s.append(hit_s if hit_s > pass_s else pass_s)
            if found is None and num_bytes_left > 0:
                # In preorder the node above was hashed, too, as there was at least as much left.
                key = node.key
                num_bytes_left -= len(key)
                is_below = above >= 0 and node.parent is nodes[above]
                found = crc32(key, hashes[above]) if is_below else hash_of(node)
            elif found is None:
                found = UNKNOWN
            hashes.append(found)
            if children:
                stack += reversed(children.values())
                aboves += [index] * len(children)
        self._num_bytes_left = num_bytes_left
        found_hashes = zip(serials[begin:], hashes[begin:], strict=True)
        self._kept.update(each for each in found_hashes if each[1] != UNKNOWN)
        if self._standing is not None:
            self._standing.weigh(nodes[begin:])

    def columns(self) -> Columns:
        """The nodes that were visited; call it once the walk is done."""
        assert not self._stack, f"{len(self._stack)} subtrees are not visited yet"
        assert self._worth is not None, "the states are not ranked yet"
        self._hashes.known = self._kept
        rounded = np.round(np.array(self._columns.last_s, np.float64), 3).tolist()
        return msgspec.structs.replace(self._columns, last_s=rounded, worth=self._worth)

    def _present(self, node: Node, above: int) -> Node | None:
        """The node in place of one whose parent is no longer that at `above`; None if it was removed."""
        while node.parent is None:
            # A node that was merged into its child still names it.
            child = next(iter(node.live_children), None)
            if child is None:
                return None
            node = child
        depth = self._columns.depth[above]
        while node.parent is not None and node.parent.parent is not None and node.parent.depth > depth:
            node = node.parent
        return node


def snapshot(
    tree: RadixTree,
    hashes: PrefixHashes | None = None,
    max_hashed_bytes: float = math.inf,
    standing: Standing | None = None,
) -> Columns:
    """The whole tree as it is."""
    walk = Walk(tree, hashes, max_hashed_bytes, standing)
    while not walk.advance(_SLICE_NODES):
        pass
    return walk.columns()


def _start(namespace: int) -> int:
    return crc32(str(namespace).encode()) if namespace else 0
