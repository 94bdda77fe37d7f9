"""The contents of a cache at one time, and its activity since the frame before: what the page draws.

    {"time_s": 12.5, "num_requests": 40, "kv_bytes_per_token": 24576, "state_bytes": 77266944,
     "pools": [{"name": "KV and states", "unit": "bytes", "size": 900, "free": 100,
                "cached": {"KV": 500, "states": 300}}],
     "nodes": {"parent": [-1, 0], "depth": [0, 7], ...},                             `snapshot.Columns`
     "hit_tokens": 7, "missed_tokens": {"first seen": 2}, "num_evicted": 1,
     "evicted": [{"hash": 1234, "depth": 7, "tokens": 3, "need": "bytes", "idle_s": 4.5, "kept": "..."}]}

What of a pool is neither free nor cached is in use. `missed_tokens` names the causes of `policy/causes.py`
that there were; the page draws the names that come. `evicted` has the latest `MAX_EVICTED`, `num_evicted` counts all.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from marconi.view.snapshot import Columns

MAX_EVICTED: Final = 100


class PoolFrame(msgspec.Struct, frozen=True):
    """A pool; all amounts are in its unit: bytes, tokens or slots."""

    name: str
    unit: str
    size: int
    free: int
    cached: dict[str, int]


class EvictedState(msgspec.Struct, frozen=True):
    """An eviction."""

    hash: int
    """Hash of the prefix that the state stood for."""
    depth: int
    """Tokens of that prefix."""
    tokens: int
    """Tokens whose KV was freed with it."""
    need: str
    """The kind of memory that was short: bytes, kv or state."""
    idle_s: float
    """Seconds since a request last started from the state or left it."""
    kept: str = ""
    """The state that was kept instead, and how much more its rule held of it; empty where the rule names none."""


class Frame(msgspec.Struct, frozen=True):
    """A cache at `time_s`, in seconds of its clock."""

    time_s: float
    num_requests: int
    """Requests so far."""
    kv_bytes_per_token: int
    state_bytes: int
    pools: list[PoolFrame]
    nodes: Columns
    hit_tokens: int
    """Prompt tokens since the frame before that were cached."""
    missed_tokens: dict[str, int]
    """Those that were computed, by cause."""
    num_evicted: int
    evicted: list[EvictedState]


def encoded(frames: Sequence[Frame]) -> bytes:
    """The frames of a file, as JSON: `{"frames": [...]}`."""
    return msgspec.json.encode({"frames": frames})
