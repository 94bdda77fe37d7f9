"""vLLM's KV events as its decoders know them, by the fields of `vllm/distributed/kv_events.py` as of September 2026.

vLLM always sends a field that has no default here, and its decoder requires it. Older releases made an array of each
event, as of the batch; SGLang's decoder takes maps alone, so a payload cannot be read by both.
"""

from typing import Any, TypeAlias

import msgspec

Hash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, tag=True):
    """KV of a group's consecutive blocks was stored."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """KV of a group's blocks was removed."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Everything was removed."""


class KVEventBatch(msgspec.Struct, array_like=True):
    """A payload."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None
