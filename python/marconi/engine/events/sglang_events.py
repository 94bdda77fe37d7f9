"""KV events of our cache for SGLang's own publisher (`--kv-events-config`), in its consumers' format, from the log.

    MarconiTreeCore --append--> TreeLog --Mirror--> KvEventRecorder --take--> SGLang's publisher

A block is a page, and is hashed as SGLang's recorder hashes it, in the format that its flag asks for. Our tree holds no
KV beyond the deepest state of its path, so a request can start from published KV up to some state at or behind it.
SGLang's events do not cover states; `--marconi-events` publishes those too.

Owner: the scheduler's thread, which takes the events after each step, as in stock.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    StorageMedium,
    kv_event_namespace_seed,
)
from sglang.srt.mem_cache.events import KvEventLoraNames

from marconi.events.base import Cleared, KvRemoved, KvStored
from marconi.events.codec import Published, signed
from marconi.events.hashes import HashSpace
from marconi.events.mirror import Mirror
from marconi.events.tree_log import Tenant, TreeLog

if TYPE_CHECKING:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


class KvEventRecorder:
    """In place of SGLang's recorder: its events are those of a tree's log."""

    def __init__(self, log: TreeLog, params: "CacheInitParams") -> None:
        self._has_dynamo_format = params.dynamo_kv_event_format
        self._lora_names = params.kv_event_lora_names or KvEventLoraNames()
        self._mirror = Mirror(
            log, params.page_size, has_tokens=True, space_of=self._space_of, adapter_of=self._adapter_of
        )

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        return [event for published in self._mirror.drain() for event in self._told(published)]

    def _told(self, published: Published) -> Iterator[KVCacheEvent]:
        match published.event:
            case KvStored(hashes, parent, _, block_tokens):
                above = None if parent is None else signed((parent,))[0]
                yield BlockStored(
                    signed(hashes),
                    above,
                    list(published.token_ids),
                    block_tokens,
                    lora_id=None,
                    medium=StorageMedium.GPU,
                    cache_salt=published.cache_salt,
                    lora_name=published.lora_name,
                )
            case KvRemoved(hashes):
                yield BlockRemoved(signed(hashes), StorageMedium.GPU)
            case Cleared():
                yield AllBlocksCleared()
            case _:
                pass

    def _space_of(self, tenant: Tenant) -> HashSpace:
        """How SGLang's recorder hashes the blocks of `tenant`: without `dynamo`, only adapters have their own."""
        space = HashSpace.of(None, *tenant)
        if self._has_dynamo_format:
            return space
        extra_key = tenant.extra_key if self._lora_names.get(tenant.extra_key) is not None else None
        return replace(space, seed=kv_event_namespace_seed(extra_key=extra_key, cache_salt=None))

    def _adapter_of(self, tenant: Tenant) -> str | None:
        names, extra_key = self._lora_names, tenant.extra_key
        name: str | None = names.resolve(extra_key) if self._has_dynamo_format else names.get(extra_key)
        return name
