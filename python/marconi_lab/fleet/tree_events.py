"""A simulated worker's events: hashes of the positions of a trace's paths, and a tree's changes in these hashes.

    h(i) = h(i - 1) + mix(id(i), i)   mod 2^64          h(-1) = mix of the namespace

A hash is a 64-bit number for each unit of a path, which stands for all units before it. `mix` is the finaliser of
splitmix64 over id and position, a bijection: two prefixes that differ meet with probability 2^-64, and a sum needs no
loop. Hashing as workers do (SHA-256 over token ids) would cost more than all else here, and a trace of blocks has no
token ids. A path may be continued from any position whose hash is known.

A live worker logs its tree's changes and makes them into events on another thread (`events.tree_log`, `mirror`). Here a
block is a unit of the trace, every node ends at one, and nothing is deferred: of a node only the hash at its end is
kept, and those within its span are computed anew when it is evicted.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marconi.events.base import MAX_HASH, Event, KvRemoved, KvStored, Namespace, StateRemoved, StateStored
from marconi.tree import Node, RadixTree
from marconi.tree.node import ID_BYTES

Hashes: TypeAlias = NDArray[np.uint64]
_GOLDEN = 0x9E3779B97F4A7C15


def start_of(namespace: int) -> int:
    """The hash that the first position of a namespace follows."""
    return int(_mix(np.array([(namespace + 1) * _GOLDEN & MAX_HASH], dtype=np.uint64))[0])


def name_of(namespace: int) -> Namespace:
    """The namespace as events have it; the first is empty."""
    return b"%d" % namespace if namespace else b""


def hashes_after(before: int, path: bytes, first: int) -> Hashes:
    """The hashes of the positions of `path`, packed ids; the first is number `first` and follows the hash `before`."""
    ids = np.frombuffer(path, dtype="<u4").astype(np.uint64)
    positions = np.arange(first, first + len(path) // ID_BYTES, dtype=np.uint64)
    found: Hashes = np.cumsum(_mix(ids << np.uint64(32) | positions), dtype=np.uint64)
    found += np.uint64(before)
    return found


def _mix(numbers: NDArray[Any]) -> Hashes:
    mixed = numbers + np.uint64(_GOLDEN)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ mixed >> np.uint64(31), dtype=np.uint64)


class TreeEvents:
    """A `marconi.tree.memory.Memory` that collects events, of a tree whose units are one id; owned by a worker."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._unit_tokens = tree.unit_tokens
        self._namespace = 0
        self._ends: dict[Node, int] = {}
        """The hash at the end of each live node, and at each root."""
        self._states: set[Node] = set()
        """Nodes whose states were published and not removed."""
        self._events: list[Event] = []

    def begin(self, namespace: int) -> None:
        """Set the namespace of the blocks stored from now on."""
        self._namespace = namespace

    def take(self, path: bytes) -> tuple[Event, ...]:
        """The events since the last time, after `path`, of the namespace begun, was inserted.

        The tree does not say which states are new: they lie on the path.
        """
        self._add_states_on(path)
        events, self._events = tuple(self._events), []
        return events

    def held(self, node: Node) -> None:
        """Note that a node's blocks are stored."""
        parent = node.parent
        assert parent is not None
        if parent.parent is None and parent not in self._ends:
            self._ends[parent] = start_of(self._namespace)
        before = self._ends[parent]
        hashes = self._hashes(node, parent)
        self._ends[node] = hashes[-1]
        self._events.append(
            KvStored(hashes, before if parent.parent is not None else None, name_of(self._namespace), self._unit_tokens)
        )

    def dropped(self, node: Node) -> None:
        """Note that a node's blocks are removed."""
        assert node.parent is not None
        self._events.append(KvRemoved(self._hashes(node, node.parent)))
        del self._ends[node]

    def dropped_state(self, node: Node) -> None:
        """Note that a state is removed; one that was removed before `take` was never published."""
        if node in self._states:
            self._states.remove(node)
            self._events.append(StateRemoved(self._ends[node]))

    def split(self, upper: Node, lower: Node) -> None:
        """Make no event: blocks stay what they are."""
        parent = upper.parent
        assert parent is not None
        self._ends[upper] = self._hashes(upper, parent)[-1]

    def joined(self, upper: Node, lower: Node) -> None:
        """Make no event: blocks stay what they are."""
        del self._ends[upper]

    def _hashes(self, node: Node, parent: Node) -> tuple[int, ...]:
        first = parent.depth // self._unit_tokens
        return tuple(hashes_after(self._ends[parent], node.key, first).tolist())

    def _add_states_on(self, path: bytes) -> None:
        node = self._tree.roots.get(self._namespace)
        position, unit_bytes = 0, self._tree.unit_bytes
        while node is not None and node.is_live:
            if node.has_state and node not in self._states:
                self._states.add(node)
                self._events.append(StateStored(self._ends[node], node.depth, name_of(self._namespace)))
            node = node.children.get(path[position : position + unit_bytes])
            if node is not None:
                if not path.startswith(node.key, position):
                    return
                position += len(node.key)
