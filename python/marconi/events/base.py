"""The records of events: what a worker stores and removes, in batches and snapshots.

A block hash is an unsigned 64-bit number that stands for the whole prefix up to the block's end: it covers the block
before it, and the namespace. Two positions are the same prefix exactly if namespace and hash are equal. A state may
stand within a block; it then has the hash of the *part* of the block that ends there, chained likewise, whose KV has a
`KvStored` of its own with the number of its tokens, as SGLang has it.

Events of one worker are in order within a batch, and batches of one epoch are numbered from 0 without a gap. An epoch
is one life of a worker: it rises with every restart. A snapshot is everything that its worker holds after batch
`sequence` of `epoch` (-1: before the first).

A batch may carry its worker's load as well. A load replaces the one before it, and one that was lost is not repeated.

The records import nothing but the standard library; `codec` brings them onto the wire.
"""

from dataclasses import dataclass
from typing import TypeAlias

Namespace: TypeAlias = bytes
"""Digest of the model, `extra_key` and `cache_salt`, 16 bytes; `b""` where there is none of them.

What is in a store behind a worker is in a namespace of its own, which ends in the store's 8 bytes; its hashes are those
of the device XOR the store, so that one worker can hold a prefix and have it in the store.
"""

MAX_HASH = (1 << 64) - 1
LOAD_PERIOD_S = 0.5
"""Time between two loads of a busy worker to which no request comes and of which none ends."""
SHARED_ELSEWHERE = "marconi_shared_elsewhere"
"""In a request's `custom_params`, from a router: tokens after which prompts on other workers diverge from this one.

All else here is sent by workers.
"""


def namespace_in(store: int, namespace: Namespace) -> Namespace:
    """The namespace of what a store, a number of 64 bits, has of `namespace`."""
    return namespace + store.to_bytes(8, "big")


def is_in_store(namespace: Namespace) -> bool:
    """True for the namespace of what a store has."""
    return len(namespace) % 16 == 8


@dataclass(frozen=True, slots=True)
class KvStored:
    """The KV of consecutive blocks was stored."""

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    """The block before the first of them; None where they begin the sequence."""
    namespace: Namespace
    block_tokens: int


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """The KV of these blocks was removed."""

    block_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StateStored:
    """A state was stored right after this block, `depth` tokens deep."""

    block_hash: int
    depth: int
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class StateRemoved:
    """The state after this block was removed."""

    block_hash: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """Everything was removed."""


Event: TypeAlias = KvStored | KvRemoved | StateStored | StateRemoved | Cleared


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """The memory that a worker can give to new requests."""

    free_tokens: int
    """KV tokens that nothing holds."""
    evictable_tokens: int
    """KV tokens that only the cache holds."""
    free_slots: int
    """State slots that nothing holds."""
    evictable_slots: int
    """State slots that only the cache holds."""


@dataclass(frozen=True, slots=True)
class StoreReach:
    """A store behind a worker's host; all workers that name the same one can start from the same states."""

    store: int
    """64 bits that no other store has."""
    s_per_token: float
    """Seconds to read the KV of a token."""
    s_per_state: float
    """Seconds to read a state."""

    def read_s(self, num_tokens: int) -> float:
        """Seconds to read a state, and the KV of `num_tokens` before it."""
        return num_tokens * self.s_per_token + self.s_per_state


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """All requests of a worker, whichever client sent them."""

    num_running: int
    """Requests that are prefilled or decoded."""
    num_waiting: int
    """Requests in its queue."""
    max_running: int
    """Requests that it runs at once."""
    num_prefill_tokens: int
    """Prompt tokens that are not cached and not computed yet, of requests that run or wait."""
    memory: FreeMemory | None = None
    """None where it does not say."""
    age_s: float = 0.0
    """Seconds since it was so, when it was sent."""
    store: StoreReach | None = None
    """None where it has none."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one worker, in order."""

    worker: str
    epoch: int
    sequence: int
    events: tuple[Event, ...]
    load: WorkerLoad | None = None
    """None where the batch carries none."""


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
    """The end of a replay: its worker has sent all the batches that it still has."""

    worker: str
