"""A priority queue whose entries can be changed: a sorted run and a binary heap, with lazy deletion.

A new entry before or after all of the run joins it at that end, any other the heap. A time that only rises, or only
falls, so costs a comparison to put and nothing to take out, whatever the number of entries.

A change adds a new entry and forgets the old one, which is dropped when it comes first; all that is forgotten is
dropped when it is more than half. All operations are amortised O(log n).
"""

import heapq
from collections import deque
from collections.abc import Iterator
from typing import TypeAlias

from marconi.policy.base import NodeView

Key: TypeAlias = float | tuple[float, ...]
Entry: TypeAlias = tuple[Key, int, NodeView]


class VictimQueue:
    """Nodes in rising order of (key, serial)."""

    __slots__ = ("_entries", "_heap", "_run")

    def __init__(self) -> None:
        self._entries: dict[NodeView, Entry] = {}
        self._run: deque[Entry] = deque()
        """In rising order."""
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[NodeView]:
        return iter(self._entries)

    def __contains__(self, node: NodeView) -> bool:
        return node in self._entries

    def put(self, node: NodeView, key: Key) -> None:
        """Add `node`, or move it to `key`."""
        entries, run = self._entries, self._run
        old = entries.get(node)
        if old is not None and old[0] == key:
            return
        entry = entries[node] = (key, node.serial, node)
        if not run or not entry < run[-1]:
            run.append(entry)
        elif entry < run[0]:
            run.appendleft(entry)
        else:
            heapq.heappush(self._heap, entry)
        if len(run) + len(self._heap) > 64 + 2 * len(entries):
            self._drop_forgotten()

    def discard(self, node: NodeView) -> None:
        """Remove `node` if it is there."""
        self._entries.pop(node, None)

    def first(self) -> NodeView | None:
        """The node with the lowest key."""
        entry = self.first_entry()
        return None if entry is None else entry[2]

    def first_entry(self) -> Entry | None:
        """The lowest key, the serial and the node of it."""
        entries, run, heap = self._entries, self._run, self._heap
        while run and entries.get(run[0][2]) is not run[0]:
            run.popleft()
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        if not heap:
            return run[0] if run else None
        return heap[0] if not run or heap[0] < run[0] else run[0]

    def _drop_forgotten(self) -> None:
        entries = self._entries
        self._run = deque(entry for entry in self._run if entries.get(entry[2]) is entry)
        self._heap = [entry for entry in self._heap if entries.get(entry[2]) is entry]
        heapq.heapify(self._heap)
