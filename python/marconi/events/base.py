"""The records of what a worker holds, as it publishes them.

A block hash is an unsigned 64-bit number that stands for the whole prefix up to the block's end: it covers the block
before it, and the namespace. Two positions are the same prefix exactly if namespace and hash are equal. A state may
stand within a block; it then carries the hash of the *part* of the block that ends there, chained likewise, whose KV
has a `KvStored` of its own with the number of its tokens, as SGLang has it.

Events of one worker are in order within a batch, and batches of one epoch are numbered from 0 without a gap. An epoch
is one life of a worker: it rises with every restart. What is in a snapshot is everything that the worker holds after
batch `sequence` of `epoch` (-1: before the first), and it says nothing of any other worker.

The records import nothing but the standard library; `codec` brings them onto the wire.
"""

from dataclasses import dataclass
from typing import TypeAlias

Namespace: TypeAlias = bytes
"""Digest of the model, `extra_key` and `cache_salt`; `b""` where there is none of them."""

MAX_HASH = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class KvStored:
    """The KV of consecutive blocks is held from now on."""

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    """The block before the first of them; None where they begin the sequence."""
    namespace: Namespace
    block_tokens: int


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """The KV of these blocks is held no more."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateStored:
    """A state stands right after this block, `depth` tokens deep."""

    block_hash: int
    depth: int
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class StateRemoved:
    """The state after this block is held no more."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """The worker holds nothing any more."""


Event: TypeAlias = KvStored | KvRemoved | StateStored | StateRemoved | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one worker, in order."""

    worker: str
    epoch: int
    sequence: int
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a worker holds after batch `sequence` of `epoch`."""

    worker: str
    epoch: int
    sequence: int
    number: int
    """The snapshot's within its epoch, rising."""
    events: tuple[Event, ...]
    """`KvStored` and `StateStored` only."""


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """A worker has sent again all the batches of a replay that it still has."""

    worker: str
