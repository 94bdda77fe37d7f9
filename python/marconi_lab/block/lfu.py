"""LFU: evicts the least frequently used block.

A block's frequency is the number of its accesses since it was admitted, 1 for the one that admitted it; an evicted
block loses its count. Among the least frequent, the one that has been at that frequency for longest is evicted: the
least recently used of them. This is LFU as libCacheSim has it (`LFU.c`).

In O(1) an access after Shah, Mitra and Matani, *An O(1) algorithm for implementing the LFU cache eviction scheme*
(2010): one queue a frequency, and the least frequency. Only two events move that one: a block leaves its queue empty
for the next higher queue (plus one), and an admission (back to 1). An eviction may empty the queue too, but is always
followed by an admission. Counters do not age, so blocks that were popular once stay: a known property of LFU.
"""

from collections import OrderedDict
from collections.abc import Set
from typing import ClassVar

from marconi_lab.block.base import BlockCache


class LfuBlockCache(BlockCache):
    """Least frequently used, ties to the least recently used; O(1) an access."""

    name: ClassVar[str] = "lfu"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._frequency: dict[int, int] = {}
        self._queues: dict[int, OrderedDict[int, None]] = {}
        self._least = 1

    def access(self, block_id: int) -> bool:
        """See `BlockCache.access`."""
        frequency = self._frequency.get(block_id)
        if frequency is not None:
            self._leave(block_id, frequency)
            if frequency == self._least and frequency not in self._queues:
                self._least = frequency + 1
            self._join(block_id, frequency + 1)
            return True
        if len(self._frequency) == self.capacity_blocks:
            victim = next(iter(self._queues[self._least]))
            self._leave(victim, self._least)
            del self._frequency[victim]
        self._least = 1
        self._join(block_id, 1)
        return False

    def _leave(self, block_id: int, frequency: int) -> None:
        queue = self._queues[frequency]
        del queue[block_id]
        if not queue:
            del self._queues[frequency]

    def _join(self, block_id: int, frequency: int) -> None:
        self._frequency[block_id] = frequency
        queue = self._queues.get(frequency)
        if queue is None:
            queue = self._queues[frequency] = OrderedDict()
        queue[block_id] = None

    @property
    def resident(self) -> Set[int]:
        """See `BlockCache.resident`."""
        return self._frequency.keys()

    def check_invariants(self) -> None:
        """The contract's, and: every block in the one queue of its frequency, none empty, the least one known."""
        super().check_invariants()
        queued = [(block_id, frequency) for frequency, queue in self._queues.items() for block_id in queue]
        assert len(queued) == len(self._frequency), "a block in two queues, or in none"
        assert dict(queued) == self._frequency, "a block in another frequency's queue"
        assert all(self._queues.values()), "an empty queue was kept"
        assert not self._queues or self._least == min(self._queues), "the least frequency is wrong"
