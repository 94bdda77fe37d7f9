"""LRU: evicts the least recently used block.

One queue in order of last use. A use moves the block to its end; a miss in a full cache evicts from its front. Within
one request the deeper blocks are the newer ones, so a prefix loses its *first* blocks first, and with them every hit.
The published block replays behave this way; a tree, which evicts leaves, avoids it.
"""

from collections import OrderedDict
from collections.abc import Set
from typing import ClassVar

from marconi_lab.block.base import BlockCache


class LruBlockCache(BlockCache):
    """Least recently used; O(1) an access."""

    name: ClassVar[str] = "lru-block"

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self._queue: OrderedDict[int, None] = OrderedDict()

    def access(self, block_id: int) -> bool:
        """See `BlockCache.access`."""
        queue = self._queue
        if block_id in queue:
            queue.move_to_end(block_id)
            return True
        if len(queue) == self.capacity_blocks:
            queue.popitem(last=False)
        queue[block_id] = None
        return False

    @property
    def resident(self) -> Set[int]:
        """See `BlockCache.resident`."""
        return self._queue.keys()
