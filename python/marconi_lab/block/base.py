"""The contract of a block cache: which of the blocks that were accessed are still there.

A block cache sees whole blocks, one at a time, and knows nothing of prefixes, tokens or states: `server.py` turns what
is resident into hits. Its capacity is a count of blocks, all of one size. Three things hold for every variant, after
every access: `num_blocks <= capacity_blocks`; the block just accessed is resident; what happens depends on the order of
the accesses alone, so equal orders leave equal caches.
"""

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import ClassVar


class BlockCache(ABC):
    """A cache of at most `capacity_blocks` blocks.

    Raises ValueError for a capacity below the variant's least.
    """

    name: ClassVar[str]
    """The policy's name on the command line."""
    min_capacity_blocks: ClassVar[int] = 1
    """The least capacity with which the rule means anything."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < self.min_capacity_blocks:
            least = self.min_capacity_blocks
            raise ValueError(f"{self.name}: the capacity in blocks must be at least {least}, got {capacity_blocks}")
        self.capacity_blocks = capacity_blocks

    @abstractmethod
    def access(self, block_id: int) -> bool:
        """Use a block; whether it was resident before.

        A resident block is touched. One that is not is admitted, always, and where the cache is full others are evicted
        to make room. The same block again, at once, is a second use: it is touched.
        """

    @property
    @abstractmethod
    def resident(self) -> Set[int]:
        """The blocks that are there: a live view, in no particular order."""

    def contains(self, block_id: int) -> bool:
        """True if a block is resident; changes nothing."""
        return block_id in self.resident

    @property
    def num_blocks(self) -> int:
        """Resident blocks."""
        return len(self.resident)

    def check_invariants(self) -> None:
        """Assert what the contract and the variant promise; time linear in the blocks held."""
        assert self.num_blocks <= self.capacity_blocks, "more blocks than the capacity"
