"""S3-FIFO as replays of the Mooncake format count it: a small, a main and a ghost queue, each bounded by itself.

    sizes     small = round(capacity * 0.1), half to even, at least 1; main = capacity - small; ghosts = main
    hit       counter = min(counter + 1, 3); no block moves
    miss      a ghost -> leaves the ghosts, to main with counter 0; no ghost -> to small with counter 0
    to small  while small holds its size, its oldest leaves: counter >= 1 -> to main, *with its counter*;
              counter 0 -> it becomes a ghost. Then the block is the newest of small
    to main   while main holds its size, its oldest: counter >= 1 -> the newest of main, with counter - 1;
              counter 0 -> it becomes a ghost, and there is room. Then the block is the newest of main
    ghosts    ids without content, the oldest dropped where they are full; never resident, never a hit

Small gives blocks up while the cache still has room, and main fills by second uses alone, so the cache may end with
fewer blocks than its capacity. In this the form differs from Algorithm 1 of Yang et al., *FIFO queues are all you need
for cache eviction* (SOSP 2023): there nothing is evicted before the cache is full, a promotion takes two hits, and
what leaves main is no ghost.

Of a capacity of 2 to 5, a tenth rounds to no block; small has one all the same, so that a new block can enter. With 1
there would be no main: refused.
"""

from collections import OrderedDict, deque
from collections.abc import Set
from typing import ClassVar

from marconi_lab.block.base import BlockCache

MAX_COUNTER = 3
"""Where a block's counter saturates: two bits."""


class S3FifoBlockCache(BlockCache):
    """Three static queues; O(1) an access, amortised: a reinsertion uses up one earlier hit."""

    name: ClassVar[str] = "s3fifo"
    min_capacity_blocks: ClassVar[int] = 2

    def __init__(self, capacity_blocks: int) -> None:
        super().__init__(capacity_blocks)
        self.small_blocks = max(round(capacity_blocks * 0.1), 1)
        """Bound of the small queue."""
        self.main_blocks = capacity_blocks - self.small_blocks
        """Bound of the main queue, and of the ghosts."""
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
        if block_id in self._ghosts:
            del self._ghosts[block_id]
            self._admit_to_main(block_id)
        else:
            self._admit_to_small(block_id)
        self._counter[block_id] = 0
        return False

    def _admit_to_small(self, block_id: int) -> None:
        while len(self._small) >= self.small_blocks:
            oldest = self._small.popleft()
            if self._counter[oldest]:
                self._admit_to_main(oldest)
            else:
                self._evict(oldest)
        self._small.append(block_id)

    def _admit_to_main(self, block_id: int) -> None:
        """Make room in main, where each block that is passed over pays one count, and append."""
        while len(self._main) >= self.main_blocks:
            oldest = self._main.popleft()
            if self._counter[oldest]:
                self._counter[oldest] -= 1
                self._main.append(oldest)
            else:
                self._evict(oldest)
        self._main.append(block_id)

    def _evict(self, block_id: int) -> None:
        """Make a block that has left its queue a ghost."""
        del self._counter[block_id]
        if len(self._ghosts) >= self.main_blocks:
            self._ghosts.popitem(last=False)
        self._ghosts[block_id] = None

    @property
    def resident(self) -> Set[int]:
        """See `BlockCache.resident`: small and main, no ghost."""
        return self._counter.keys()

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
        """The contract's, and: each resident in one queue, once; counters in 0 .. 3; no resident ghost."""
        super().check_invariants()
        queued = [*self._small, *self._main]
        assert len(queued) == len(self._counter), "a block in two queues, or in none"
        assert set(queued) == self._counter.keys(), "the queues and the counters name different blocks"
        assert all(0 <= counter <= MAX_COUNTER for counter in self._counter.values()), "a counter out of range"
        assert len(self._small) <= self.small_blocks, "more blocks in small than its size"
        assert len(self._main) <= self.main_blocks, "more blocks in main than its size"
        assert len(self._ghosts) <= self.main_blocks, "more ghosts than main's size"
        assert self._ghosts.keys().isdisjoint(self._counter), "a resident ghost"
