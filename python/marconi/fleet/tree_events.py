"""The changes of a worker's tree, as the events that a router receives.

A live worker logs its tree's changes and makes them into events on another thread, in SGLang's hashes of token blocks
(`events.tree_log`, `mirror`). Here a block is a unit of the trace, every node ends at one, and nothing has to
be deferred: of a node only the hash at its end is kept, and those within its span are computed anew when it goes.
"""

from marconi.events.base import Event, KvRemoved, KvStored, StateRemoved, StateStored
from marconi.fleet.hashes import hashes_after, name_of, start_of
from marconi.tree import Node, RadixTree


class TreeEvents:
    """A `marconi.tree.memory.Memory` of a tree whose units are one id; owned by a worker."""

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._unit_tokens = tree.unit_tokens
        self._namespace = 0
        self._ends: dict[Node, int] = {}
        """The hash at the end of each live node, and at each root."""
        self._states: set[Node] = set()
        """Published, and not removed."""
        self._events: list[Event] = []

    def begin(self, namespace: int) -> None:
        """Set the namespace of what is held from now on."""
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
        """Note that a state is removed; one that went as soon as it came was never published."""
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
