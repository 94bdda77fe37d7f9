"""The contract of a store: whole objects, bytes under a name.

An object's name says what its bytes are, so it is written once. It may be gone at any time, and its bytes may be others
than were written: `sealed.py` finds out. What the store itself fails at is raised, and is a miss.

Owner: SGLang's threads, of which one reads, one writes and one asks what is there.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from sglang.srt.mem_cache.hicache_storage import PoolTransfer, PoolTransferResult


class Objects(Protocol):
    """The objects of a store that are one rank's, or every rank's."""

    @property
    def place(self) -> str:
        """Where the objects are, in words that the servers of another store do not have."""
        ...

    def find(self, names: list[str], transfers: list[PoolTransfer]) -> PoolTransferResult:
        """How many of the first of `names`, pages of KV, there are, up to one with a state: `NAME.POOL`."""
        ...

    def missing(self, names: Sequence[str]) -> list[int]:
        """Which of `names` there are not, by their places."""
        ...

    def memory(self, num_bytes: int) -> torch.Tensor:
        """Memory to read into and to write from, uint8; the thread's own until it asks again."""
        ...

    def read(self, names: Sequence[str], into: Sequence[torch.Tensor]) -> list[int | None]:
        """Read each object into a part of `memory`; returns the bytes of each, None for one that is not there.

        One of another length than its part has is said to have fewer bytes.
        """
        ...

    def write(self, names: Sequence[str], parts: Sequence[torch.Tensor]) -> int:
        """Write parts of `memory` as objects that are missing; returns how many of the first were written."""
        ...

    def remove(self, name: str) -> str:
        """Remove an object; returns where it was, for a log."""
        ...

    def close(self) -> None:
        """Leave the store."""
        ...
