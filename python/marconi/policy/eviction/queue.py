"""A priority queue whose entries can be changed: a binary heap with lazy deletion.

A change pushes a new entry and forgets the old one, which is dropped when it surfaces; the heap is rebuilt when more
than half of it is forgotten. All operations are amortised O(log n).
"""

import heapq
from collections.abc import Iterator
from typing import TypeAlias

from marconi.policy.eviction.base import NodeView

Key: TypeAlias = float | tuple[float, ...]


class VictimQueue:
    """Nodes in rising order of (key, serial)."""

    __slots__ = ("_entries", "_heap")

    def __init__(self) -> None:
        self._entries: dict[NodeView, tuple[Key, int, NodeView]] = {}
        self._heap: list[tuple[Key, int, NodeView]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[NodeView]:
        return iter(self._entries)

    def __contains__(self, node: NodeView) -> bool:
        return node in self._entries

    def put(self, node: NodeView, key: Key) -> None:
        """Add `node`, or move it to `key`."""
        old = self._entries.get(node)
        if old is not None and old[0] == key:
            return
        entry = (key, node.serial, node)
        self._entries[node] = entry
        heap = self._heap
        heapq.heappush(heap, entry)
        if len(heap) > 64 + 2 * len(self._entries):
            heap[:] = self._entries.values()
            heapq.heapify(heap)

    def discard(self, node: NodeView) -> None:
        """Remove `node` if it is there."""
        self._entries.pop(node, None)

    def first(self) -> NodeView | None:
        """The node with the lowest key."""
        entry = self.first_entry()
        return None if entry is None else entry[2]

    def first_entry(self) -> tuple[Key, int, NodeView] | None:
        """The lowest key, the serial and the node of it."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry
            heapq.heappop(heap)
        return None
