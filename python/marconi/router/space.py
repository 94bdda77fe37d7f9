"""The entries of an index: a `Space` is all blocks of one namespace, a `Holding` all entries of one life of a worker.

    Space      hash of a block -> bits of its holders
    Holding    hash of a block -> its namespace

Both are maps of numbers and bytes only, in which the garbage collector has nothing to walk. Owned by `FleetIndex`.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
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
        """Number of blocks of KV and states."""
        return len(self.kv) + len(self.states)


class Space:
    """The blocks of one namespace that any worker holds, and the states kept after blocks."""

    __slots__ = ("blocks", "part_of", "parts", "states")

    def __init__(self) -> None:
        self.blocks: dict[int, int] = {}
        """Hash -> bits of the workers that hold the KV, and `MARKED`."""
        self.states: dict[int, int] = {}
        """Hash -> bits of the workers that keep the state after it."""
        self.part_of: dict[int, tuple[int | None, int]] = {}
        """Part -> the full block before it, None if it is the first, and the part's tokens."""
        self.parts: dict[int | None, Counter[int]] = {}
        """Full block -> number of parts that follow it, by their tokens."""

    def is_marked(self, block_hash: int) -> bool:
        """True if a state is kept after a block, or a part follows it."""
        return block_hash in self.states or block_hash in self.parts

    def add_state(self, block_hash: int, bit: int) -> None:
        """Add a holder of the state after a block."""
        self.states[block_hash] = self.states.get(block_hash, 0) | bit
        self._mark(block_hash)

    def remove_state(self, block_hash: int, bit: int) -> None:
        """Remove a holder of the state after a block."""
        self.states[block_hash] ^= bit
        if not self.states[block_hash]:
            del self.states[block_hash]
            self._unmark(block_hash)

    def add_part(self, part: int, parent: int | None, num_tokens: int) -> None:
        """Add a part behind the full block `parent`."""
        self.part_of[part] = (parent, num_tokens)
        self.parts.setdefault(parent, Counter())[num_tokens] += 1
        self._mark(parent)

    def remove_part(self, part: int) -> None:
        """Remove a part."""
        parent, num_tokens = self.part_of.pop(part)
        parts = self.parts[parent]
        parts[num_tokens] -= 1
        if not parts[num_tokens]:
            del parts[num_tokens]
        if not parts:
            del self.parts[parent]
            self._unmark(parent)

    def check_invariants(self, held: Mapping[int, int], kept: Mapping[int, int]) -> None:
        """Raise `AssertionError` where the maps disagree with the holdings' bits of blocks held and states kept."""
        assert self.blocks == {block_hash: mask | self.is_marked(block_hash) for block_hash, mask in held.items()}
        assert self.states == kept
        parts: dict[int | None, Counter[int]] = {}
        for part, (parent, num_tokens) in self.part_of.items():
            assert part in held, f"part {part:x} is dropped with its last holder"
            parts.setdefault(parent, Counter())[num_tokens] += 1
        assert self.parts == parts

    def _mark(self, block_hash: int | None) -> None:
        if block_hash is not None and block_hash in self.blocks:
            self.blocks[block_hash] |= MARKED

    def _unmark(self, block_hash: int | None) -> None:
        if block_hash is not None and block_hash in self.blocks and not self.is_marked(block_hash):
            self.blocks[block_hash] ^= MARKED


@dataclass(slots=True)
class IndexStats:
    """Counters of entries that an index refused: never a wrong answer, at most a missed hit."""

    num_malformed: int = 0
    """No 64-bit hash, or a block of another size than the fleet's."""
    num_conflicting: int = 0
    """Stored in another namespace than before, or a part behind another block or of another length."""
    num_unknown_removals: int = 0
    """Removed, but not held: refused when it was stored."""
    num_over_limit: int = 0
    """More than one worker, or all of them together, may hold."""
