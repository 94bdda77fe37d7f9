"""KV and states in one pool of bytes (`--enable-unified-memory`), as the cache takes memory from it.

KV grows down from the top of one buffer and states up from its bottom, each in entries of its own size; what is freed
in between is closed up by moving entries, whose indices are names that stay. So whatever a victim frees serves either
side, and what can be lent is

    free = num_bytes - KV that is lent - states that are lent,      in whole pages, or in whole states.

Entry 0 of the states, and what of the buffer makes no whole page at its top, is never lent.

The old place of an entry that has moved is *pending* while a forward pass may still read it. SGLang does not count it
until it finds that the pass has ended, which each of several ranks finds at its own time: one that counts less would
evict another state. Here pending places count as free, so what can be lent depends on what is lent alone, the same on
every rank; one rank does as many do. An allocation that needs them makes the stream, not the host, wait for the pass.

Transfers of a prefill server, and copies to and from a host tier, forbid SGLang to move entries while they last, so
gaps between what is lent cannot be lent then. There SGLang counts by itself, and every rank closes the same gaps at the
same step (`admission.around_flush`).

Whichever is short, the victim is the one of least worth for the bytes that it frees (`Need.BYTES`), and victims are
evicted until there is room: for as many KV tokens, or states, as SGLang lacks. SGLang itself asks component by
component, KV first.

A hit needs a slot for a copy of its state before it is admitted, and a pool that is full of running requests may have
none: then it is no hit, for now.

A planned state takes bytes that its own request may need for KV, in this prefill or in the next chunk: it is written
only if there is room for the prompt beside it, once all that is evictable has been evicted.

Sources: `srt/mem_cache/allocator/unified_mamba.py`, `srt/mem_cache/allocator/unified_sub_pool.py`; of what it replaces
`srt/mem_cache/unified_radix_cache.py:evict_for_alloc`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from marconi.engine.cache.pools import DevicePools, Targets, num_drawn
from marconi.engine.cache.tree_core import MarconiTreeCore
from marconi.engine.reports.status import Use
from marconi.lifecycle.pools import Amount
from marconi.policy.base import Need
from marconi.tree import Freed, Node


class JointMemory:
    """The one pool of a scheduler, in bytes."""

    def __init__(self, allocator: UnifiedMambaTokenToKVPoolAllocator) -> None:
        """The pool that `allocator` lends from."""
        kv, states = allocator.full_attn_allocator, allocator.mamba_allocator
        self._kv, self._states = kv, states
        # Tokens of several ranks share an entry with `--dcp-size`.
        self.kv_bytes_per_token: int = -(-kv.entry_bytes_per_page // kv.page_size)
        self.state_bytes: int = states.entry_bytes
        self.num_bytes: int = kv.num_pages * kv.entry_bytes_per_page - states.min_slot_index * states.entry_bytes

    @classmethod
    def of(cls, allocator: Any) -> "JointMemory | None":
        """That behind the KV allocator of a server; None if KV and states have pools of their own."""
        return cls(allocator) if isinstance(allocator, UnifiedMambaTokenToKVPoolAllocator) else None

    @property
    def num_free_bytes(self) -> int:
        """Bytes that are not lent."""
        return self.num_bytes - self.bytes_of(self._kv.allocated_count(), self._states.allocated_count())

    @property
    def awaits_copies(self) -> bool:
        """True while copies between the device and a host tier forbid SGLang to move entries."""
        gate = self._kv.host_transfer_move_gate
        return gate is not None and not gate()

    def bytes_of(self, num_tokens: int, num_states: int) -> int:
        """Bytes of `num_tokens` and `num_states`."""
        return num_tokens * self.kv_bytes_per_token + num_states * self.state_bytes


class JointPools(DevicePools):
    """One budget for KV and states."""

    needs = dict.fromkeys((ComponentType.FULL, ComponentType.MAMBA), Need.BYTES)

    def __init__(self, requests: Any, kv: Any, memory: JointMemory) -> None:
        """`memory` is the one pool, in bytes."""
        super().__init__(requests, kv)
        self.memory = memory

    @property
    def sizes(self) -> Mapping[Need, int]:
        """Bytes of the one pool."""
        return {Need.BYTES: self.memory.num_bytes}

    @property
    def num_free(self) -> Mapping[Need, int]:
        """Bytes that are not lent."""
        return {Need.BYTES: self.memory.num_free_bytes}

    def amounts(self, num_tokens: int, num_states: int) -> Mapping[Need, int]:
        """Bytes of `num_tokens` and `num_states`."""
        return {Need.BYTES: self.memory.bytes_of(num_tokens, num_states)}

    def room_for(self, num_tokens: int, num_states: int) -> tuple[EvictParams, Targets] | None:
        """The eviction as one of KV, in as many tokens as the missing bytes hold: victims are chosen for bytes."""
        num_wanted = self.memory.bytes_of(num_tokens, num_states)
        num_short = num_wanted - self.memory.num_free_bytes
        if num_short <= 0:
            return None
        per_token = self.memory.kv_bytes_per_token
        target = ComponentType.FULL, -(-num_wanted // per_token)
        return EvictParams(num_tokens=-(-num_short // per_token)), {ComponentType.FULL: target}

    @property
    def awaits_copies(self) -> bool:
        """True while copies forbid SGLang to move entries."""
        return self.memory.awaits_copies

    def can_lend(self, num_tokens: int, num_states: int) -> bool:
        """True unless entries would have to be moved for it, which copies forbid."""
        if not self.awaits_copies:
            return True
        slots, num_bytes = self.req_to_token_pool.mamba_allocator, self.memory.bytes_of(0, num_states)
        num_beside = num_tokens - (-num_bytes // self.memory.kv_bytes_per_token)
        return bool(
            slots.schedulable_available_size() >= num_states
            and self.token_to_kv_pool_allocator.available_size() >= num_beside
        )

    def joint_use(self, core: MarconiTreeCore) -> Use:
        """Bytes of the one pool."""
        return Use(self.memory.num_bytes, self.memory.num_free_bytes, self._evictable_bytes(core))

    def obtainable_bytes(self, core: MarconiTreeCore) -> int:
        """Bytes that requests can be given once everything evictable has been evicted."""
        return self._lendable_bytes + self._evictable_bytes(core)

    def _evictable_bytes(self, core: MarconiTreeCore) -> int:
        return self.memory.bytes_of(core.evictable_size(), core.mamba_evictable_size())

    @property
    def _lendable_bytes(self) -> int:
        """Bytes to be had without an eviction; slots that SGLang has drawn for what waits are free as well."""
        return self.memory.num_free_bytes + self.memory.bytes_of(0, num_drawn(self.req_to_token_pool.mamba_allocator))

    def has_slot_for_copy(self, source: Node, core: MarconiTreeCore) -> bool:
        """True if a slot can be taken while `source` is in use."""
        memory, lendable = self.memory, self._lendable_bytes
        if lendable >= memory.state_bytes:
            return True
        num_tokens = core.memory.num_unprotected_tokens(source)
        beside = self._evictable_bytes(core) - memory.bytes_of(num_tokens, int(not source.num_locks))
        return lendable + beside >= memory.state_bytes

    def spares_slot(self, evictable: Amount, reserved: Amount) -> bool:
        """Compare in bytes."""
        num_tokens, num_states = evictable.num_tokens - reserved.num_tokens, evictable.num_states - reserved.num_states
        return self.memory.num_free_bytes + self.memory.bytes_of(num_tokens, num_states - 1) >= 0

    def evict(
        self, core: MarconiTreeCore, params: EvictParams, targets: Targets, available: Callable[[Any], int]
    ) -> Freed:
        """Evict until `targets` can be lent, or nothing is evictable any more."""
        if not targets:
            return super().evict(core, params, targets, available)
        freed = Freed(0, 0)
        while num_missing_bytes := self._num_missing_bytes(targets, available):
            while num_missing_bytes > 0:
                one = core.evict_one(Need.BYTES)
                if one is None:
                    return freed
                freed = Freed(freed.num_tokens + one.num_tokens, freed.num_states + one.num_states)
                num_missing_bytes -= self.memory.bytes_of(*one)
            self.give_back(core)
        return freed

    def _num_missing_bytes(self, targets: Targets, available: Callable[[Any], int]) -> int:
        """Bytes to free before `targets` can be lent; 0 if they can. Counts what is freed at the end of a group.

        Where SGLang may not move entries, less can be lent than bytes are free, and the next victim is one too few or
        enough: 1. While copies to a host forbid it, bytes that are free are enough: they can be lent once the copies
        have arrived, for which the cache waits (`host/cache.py`).
        """
        self.token_to_kv_pool_allocator.flush_deferred_full_frees()
        memory, num_missing = self.memory, 0
        for kind, target in targets.values():
            if available(kind) < target:
                num_wanted = memory.bytes_of(target, 0) if kind is ComponentType.FULL else memory.bytes_of(0, target)
                num_short = num_wanted - memory.num_free_bytes
                if num_short <= 0 and not memory.awaits_copies:
                    num_short = 1
                num_missing = max(num_missing, num_short)
        return num_missing
