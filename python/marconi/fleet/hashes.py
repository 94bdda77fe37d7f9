"""Hashes of positions: a 64-bit number for each unit of a path, which stands for all before it.

    h(i) = h(i - 1) + mix(id(i), i)   mod 2^64          h(-1) = mix of the namespace

`mix` is the finaliser of splitmix64 over id and position, a bijection: two prefixes that differ meet with probability
2^-64, and a sum needs no loop. Hashing as workers do (SHA-256 over token ids) would cost more than all else here, and a
trace of blocks has no token ids. A path may be continued from any position whose hash is known.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from marconi.events.base import MAX_HASH, Namespace
from marconi.tree.node import ID_BYTES

Hashes: TypeAlias = NDArray[np.uint64]
_GOLDEN = 0x9E3779B97F4A7C15


def start_of(namespace: int) -> int:
    """The hash that the first position of a namespace follows."""
    return int(_mix(np.array([(namespace + 1) * _GOLDEN & MAX_HASH], dtype=np.uint64))[0])


def name_of(namespace: int) -> Namespace:
    """The namespace as events have it; the first is empty."""
    return b"%d" % namespace if namespace else b""


def hashes_after(before: int, path: bytes, first: int) -> Hashes:
    """The hashes of the positions of `path`, packed ids; the first is number `first` and follows the hash `before`."""
    ids = np.frombuffer(path, dtype="<u4").astype(np.uint64)
    positions = np.arange(first, first + len(path) // ID_BYTES, dtype=np.uint64)
    found: Hashes = np.cumsum(_mix(ids << np.uint64(32) | positions), dtype=np.uint64)
    found += np.uint64(before)
    return found


def _mix(numbers: NDArray[Any]) -> Hashes:
    mixed = numbers + np.uint64(_GOLDEN)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ mixed >> np.uint64(31), dtype=np.uint64)
