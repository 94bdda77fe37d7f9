"""A tree as flat arrays: what another process needs to go on from where the tree stands.

Paths are deep, so nodes are not pickled by reference: they are numbered level by level from the roots, children in
their order, and each fact of a node is a column. A parent's number is smaller than its children's, so restoring is one
pass. Depths, counts of children and the tree's totals follow from the rest and are not stored.

What a host tier holds is not in it. A snapshot costs some microseconds a node and one copy of the spans, and changes
nothing in the tree.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from marconi.tree.node import ID_BYTES, Node
from marconi.tree.radix import RadixTree

_LIVE = 1
_STATE = 2
_NO_PARENT = -1


@dataclass(frozen=True, slots=True, eq=False)
class TreeSnapshot:
    """All facts of a tree; row i of a column is node i. Made by `take_snapshot`; can be pickled."""

    unit_tokens: int
    unit_bytes: int
    max_ghosts: int
    max_ghost_tokens: int | None
    num_created: int
    """Nodes ever made, which gives the next serial."""
    namespaces: tuple[int, ...]
    """The roots' namespaces; roots are the first rows."""
    keys: bytes
    """The spans, one after the other."""
    key_ends: NDArray[np.int64]
    """Where each span ends in `keys`, in bytes."""
    parents: NDArray[np.int64]
    serials: NDArray[np.int64]
    flags: NDArray[np.uint8]
    num_locks: NDArray[np.int64]
    num_hits: NDArray[np.int64]
    last_hit_s: NDArray[np.float64]
    last_pass_s: NDArray[np.float64]
    ghosts: NDArray[np.int64]
    """Rows of the ghosts, oldest first."""

    @property
    def num_nodes(self) -> int:
        """Roots, live nodes and ghosts."""
        return len(self.parents)

    @property
    def num_bytes(self) -> int:
        """Size of the columns."""
        columns = (self.key_ends, self.parents, self.serials, self.flags, self.num_locks, self.num_hits)
        times = (self.last_hit_s, self.last_pass_s)
        return len(self.keys) + self.ghosts.nbytes + sum(column.nbytes for column in (*columns, *times))

    def without_locks(self) -> "TreeSnapshot":
        """The same with every lock given back, for a replay that does not run the requests that hold them."""
        return replace(self, num_locks=np.zeros_like(self.num_locks))

    def restore(self) -> RadixTree:
        """A tree that goes on as this one would. `changed` names every node with a state, so that it can be ranked."""
        tree = RadixTree(
            self.unit_tokens, self.max_ghosts, self.unit_bytes // ID_BYTES, max_ghost_tokens=self.max_ghost_tokens
        )
        nodes = self._structure(tree)
        facts = zip(
            nodes,
            self.flags.tolist(),
            self.num_locks.tolist(),
            self.num_hits.tolist(),
            self.last_hit_s.tolist(),
            self.last_pass_s.tolist(),
            strict=True,
        )
        for node, flags, num_locks, num_hits, last_hit_s, last_pass_s in facts:
            node.num_locks, node.num_hits = num_locks, num_hits
            node.last_hit_s, node.last_pass_s = last_hit_s, last_pass_s
            node.is_live = bool(flags & _LIVE)
            node.has_state = bool(flags & _STATE)
            parent = node.parent
            if not node.is_live and parent is not None:
                tree.num_ghost_tokens += node.depth - parent.depth
            elif parent is not None:
                parent.live_children[node] = None
                tree.num_nodes += 1
                tree.num_tokens += node.depth - parent.depth
        tree.changed = [node for node in nodes if node.has_state]
        tree.num_states = len(tree.changed)
        tree.ghosts.update((nodes[row], None) for row in self.ghosts.tolist())
        tree._num_created = self.num_created
        return tree

    def _structure(self, tree: RadixTree) -> list[Node]:
        """Spans, parents and children."""
        nodes: list[Node] = []
        start = 0
        unit_tokens, unit_bytes, keys = self.unit_tokens, self.unit_bytes, self.keys
        for row, end, serial in zip(self.parents.tolist(), self.key_ends.tolist(), self.serials.tolist(), strict=True):
            if row == _NO_PARENT:
                node = tree.roots[self.namespaces[len(nodes)]] = Node(b"", None, 0, serial)
                tree._namespaces[node] = self.namespaces[len(nodes)]
            else:
                parent = nodes[row]
                node = Node(keys[start:end], parent, parent.depth + (end - start) // unit_bytes * unit_tokens, serial)
                parent.children[node.key[:unit_bytes]] = node
            start = end
            nodes.append(node)
        return nodes


def take_snapshot(tree: RadixTree) -> TreeSnapshot:
    """The tree as it stands."""
    nodes = list(tree.roots.values())
    parents = [_NO_PARENT] * len(nodes)
    for row, node in enumerate(nodes):  # grows while it is walked: level by level
        nodes.extend(node.children.values())
        parents.extend([row] * len(node.children))
    rows = {ghost: row for row, ghost in enumerate(nodes) if not ghost.is_live}
    hosted = [row for node, row in rows.items() if node.is_hosted]
    return TreeSnapshot(
        unit_tokens=tree.unit_tokens,
        unit_bytes=tree.unit_bytes,
        max_ghosts=tree.max_ghosts,
        max_ghost_tokens=tree.max_ghost_tokens,
        num_created=tree._num_created,
        namespaces=tuple(tree.roots),
        keys=b"".join([node.key for node in nodes]),
        key_ends=np.cumsum([len(node.key) for node in nodes], dtype=np.int64),
        parents=np.array(parents, np.int64),
        serials=np.array([node.serial for node in nodes], np.int64),
        flags=np.array([_flags(node) for node in nodes], np.uint8),
        num_locks=np.array([node.num_locks for node in nodes], np.int64),
        num_hits=np.array([node.num_hits for node in nodes], np.int64),
        last_hit_s=np.array([node.last_hit_s for node in nodes], np.float64),
        last_pass_s=np.array([node.last_pass_s for node in nodes], np.float64),
        # What the host alone holds is a ghost where there is no host: the youngest, children before their parents.
        ghosts=np.array([*(rows[ghost] for ghost in tree.ghosts), *hosted[::-1]], np.int64),
    )


def _flags(node: Node) -> int:
    return node.is_live * _LIVE + node.has_state * _STATE
