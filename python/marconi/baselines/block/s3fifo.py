"""S3-FIFO: a small queue that most blocks leave quickly, a main queue for those that were used again, and ghosts.

Source: Yang et al., *FIFO queues are all you need for cache eviction* (SOSP 2023), Algorithm 1, with the small queue's
size as the Mooncake-format replays round it.

    sizes     small = round(capacity / 10), half to even (5 -> 0, 15 -> 2, 25 -> 2); main = capacity - small;
              ghosts = main
    hit       counter = min(counter + 1, 3); no block moves
    miss      was the block a ghost? Then it leaves the ghosts
              while small + main hold `capacity` blocks: evict
              a ghost  -> to the newest end of main, counter 0
              no ghost -> to the newest end of small, counter 0
    evict     small holds its size or more, and any block -> from small, else from main
      small   oldest first: counter >= 2 -> to main, *with its counter*; where main then holds more than its size, evict
              from main; go on with the next. Counter < 2 -> it becomes a ghost; done
      main    oldest first: counter >= 1 -> back to the newest end with counter - 1; go on. Counter 0 -> gone; done
      ghosts  a queue of ids without content, the oldest dropped beyond its size; never resident, never a hit

What the sources leave open, and the choice here:

- *Promotion threshold.* The paper's text says "accessed more than once", its Algorithm 1 `freq > 1` with the counter 0
  on admission, libCacheSim `move-to-main-threshold=2` (`S3FIFO.c`, `S3FIFOv0.c`): two hits, not one. So it is here.
- *Counter of a promoted block.* Kept, as in Algorithm 1; the paper's text clears it, libCacheSim inserts anew.
- *A full main* at a promotion is one that the promoted block takes beyond its size, not to it.
- *Sizes are targets.* As in Algorithm 1 and `S3FIFOv0.c`, nothing is evicted before the cache is full, so small first
  grows beyond its size; ghosts that return while there is room may take main beyond its own. Only the sum is bounded.
- *When is it a ghost?* When it is accessed, before room is made for it, as in libCacheSim. Algorithm 1 asks after the
  eviction, which may just have dropped it: blocks that return in the order in which they left, as those of a prefix do,
  would each miss their ghost by one.
- *Small of size 0* (capacity 2 to 5): new blocks still enter small, and it is then always the first to be evicted from.
- *Capacity 1* leaves one of the two queues no block: refused.
"""

from collections import OrderedDict, deque
from collections.abc import Set
from typing import ClassVar

from marconi.baselines.block.base import BlockCache

MAX_COUNTER = 3
"""Where a block's counter saturates: two bits."""
PROMOTION_COUNTER = 2
"""The least counter with which a block moves from small to main."""


class S3FifoBlockCache(BlockCache):
    """Three static queues; O(1) an access, amortised: a reinsertion uses up one earlier hit."""

    name: ClassVar[str] = "s3fifo"
    min_capacity_blocks: ClassVar[int] = 2

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.small_blocks = round(capacity_blocks / 10)
        """Target size of the small queue."""
        self.main_blocks = capacity_blocks - self.small_blocks
        """Target size of the main queue, and the bound of the ghosts."""
        self._counter: dict[int, int] = {}
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def access(self, block_id: int) -> bool:
        """See `BlockCache.access`."""
        counter = self._counter.get(block_id)
        if counter is not None:
            if counter < MAX_COUNTER:
                self._counter[block_id] = counter + 1
            return True
        queue = self._small
        if block_id in self._ghosts:
            del self._ghosts[block_id]
            queue = self._main
        while len(self._counter) >= self.capacity_blocks:
            self._evict()
        queue.append(block_id)
        self._counter[block_id] = 0
        return False

    def _evict(self) -> None:
        if self._small and len(self._small) >= self.small_blocks:
            self._evict_from_small()
        else:
            self._evict_from_main()

    def _evict_from_small(self) -> None:
        """Make the oldest block that has not earned its promotion a ghost; promote those before it."""
        while self._small:
            block_id = self._small.popleft()
            if self._counter[block_id] < PROMOTION_COUNTER:
                del self._counter[block_id]
                self._ghosts[block_id] = None
                if len(self._ghosts) > self.main_blocks:
                    self._ghosts.popitem(last=False)
                return
            self._main.append(block_id)
            if len(self._main) > self.main_blocks:
                self._evict_from_main()

    def _evict_from_main(self) -> None:
        """Evict the oldest block without a chance left; each one passed over pays one."""
        while True:
            block_id = self._main.popleft()
            counter = self._counter[block_id]
            if counter == 0:
                del self._counter[block_id]
                return
            self._counter[block_id] = counter - 1
            self._main.append(block_id)

    @property
    def resident(self) -> Set[int]:
        """See `BlockCache.resident`: small and main, no ghost."""
        return self._counter.keys()

    def contains(self, block_id: int) -> bool:
        """See `BlockCache.contains`."""
        return block_id in self._counter

    @property
    def small(self) -> tuple[tuple[int, int], ...]:
        """The small queue as (block, counter), oldest first."""
        return tuple((block_id, self._counter[block_id]) for block_id in self._small)

    @property
    def main(self) -> tuple[tuple[int, int], ...]:
        """The main queue as (block, counter), oldest first."""
        return tuple((block_id, self._counter[block_id]) for block_id in self._main)

    @property
    def ghosts(self) -> tuple[int, ...]:
        """The ghosts, oldest first."""
        return tuple(self._ghosts)

    def check_invariants(self) -> None:
        """The contract's, and: each resident in one queue, once; counters in 0 .. 3; ghosts bounded, none resident."""
        super().check_invariants()
        queued = [*self._small, *self._main]
        assert len(queued) == len(self._counter), "a block in two queues, or in none"
        assert set(queued) == self._counter.keys(), "the queues and the counters name different blocks"
        assert all(0 <= counter <= MAX_COUNTER for counter in self._counter.values()), "a counter out of range"
        assert len(self._ghosts) <= self.main_blocks, "more ghosts than main's size"
        assert self._ghosts.keys().isdisjoint(self._counter), "a resident ghost"
