"""The entries of an index: of a namespace, from a block to its holders; of a worker, from a hash to its namespace.

Both are maps of numbers and bytes only, in which the garbage collector has nothing to walk. Owned by `FleetIndex`.
"""

from collections import Counter
from typing import Final

from marconi.events.base import Namespace

MARKED: Final = 1
"""The lowest bit of a block's mask: a state is kept right after the block, or a part follows it."""


class Holding:
    """The entries of one life of a worker, and its bit in the masks."""

    __slots__ = ("bit", "kv", "states")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.kv: dict[int, Namespace] = {}
        self.states: dict[int, Namespace] = {}

    @property
    def num_entries(self) -> int:
        """Blocks of KV and states."""
        return len(self.kv) + len(self.states)


class Space:
    """The blocks of one namespace that anybody holds, and the states kept after blocks."""

    __slots__ = ("blocks", "part_of", "parts", "states")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        """Hash -> who holds the KV, and `MARKED`."""
        self.states: dict[int, int] = {}
        """Hash -> who keeps the state after it."""
        self.part_of: dict[int, tuple[int | None, int]] = {}
        """Part -> the full block before it, None if it is the first, and the part's tokens."""
        self.parts: dict[int | None, Counter[int]] = {}
        """Full block -> how many parts of how many tokens follow it."""

    def is_marked(self, block_hash: int) -> bool:
        """Whether a state is kept after a block, or a part follows it."""
        return block_hash in self.states or block_hash in self.parts

    def mark(self, block_hash: int | None) -> None:
        """Mark a block, if anybody holds it."""
        if block_hash is not None and block_hash in self.blocks:
            self.blocks[block_hash] |= MARKED

    def unmark(self, block_hash: int | None) -> None:
        """Clear the mark of a block, if nothing is left after it."""
        if block_hash is not None and block_hash in self.blocks and not self.is_marked(block_hash):
            self.blocks[block_hash] ^= MARKED

    def add_part(self, part: int, parent: int | None, num_tokens: int) -> None:
        """Note where a part stands."""
        self.part_of[part] = (parent, num_tokens)
        self.parts.setdefault(parent, Counter())[num_tokens] += 1
        self.mark(parent)

    def remove_part(self, part: int) -> None:
        """Forget where a part stood."""
        parent, num_tokens = self.part_of.pop(part)
        parts = self.parts[parent]
        parts[num_tokens] -= 1
        if not parts[num_tokens]:
            del parts[num_tokens]
        if not parts:
            del self.parts[parent]
            self.unmark(parent)
