"""The cache of a hybrid model whose KV and states share one pool of bytes (`--enable-unified-memory`).

Whichever is short, the victim is the one of least worth for the bytes that it frees (`Need.BYTES`), and victims are
evicted until there is room: for as many KV tokens, or states, as SGLang lacks. SGLang itself asks component by
component, KV first.

A hit needs a slot for a copy of its state before it is admitted, and a pool that is full of running requests may have
none: then it is no hit, for now.

A planned state takes bytes that its own request may need for KV, in this prefill or in the next chunk: it is written
only if there is room for the prompt beside it, once all that is evictable has been evicted.

Source of what it extends: `srt/mem_cache/unified_radix_cache.py:evict_for_alloc`.
"""

import time
from collections.abc import Callable
from operator import length_hint
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, MatchPrefixParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from marconi.engine.cache import MarconiRadixCache
from marconi.engine.core.tree_core import IDS_PER_TOKEN, MarconiTreeCore
from marconi.engine.joint.memory import JointMemory
from marconi.engine.policies import ONE_POOL, hybrid_cache
from marconi.engine.status import Use
from marconi.policy.base import Need
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease
from marconi.tree import Freed, Node
from marconi.tree.memory import Memory

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

_NEEDS = dict.fromkeys((ComponentType.FULL, ComponentType.MAMBA), Need.BYTES)


class JointRadixCache(MarconiRadixCache):
    """One budget for KV and states."""

    def make_tree_core(self, params: "CacheInitParams") -> MarconiTreeCore:
        """The core of this cache, whose victims free bytes."""
        joint = JointMemory.of(params.token_to_kv_pool_allocator)
        assert joint is not None, "pools of their own for KV and states"
        self.joint_memory = joint
        page = params.page_size

        def make(memory: Memory) -> HybridCache:
            ids, explains = page * IDS_PER_TOKEN, self.flags.explain
            return hybrid_cache(self.choice, self.costs, page, ids, memory, self.latency, ONE_POOL, explains=explains)

        return MarconiTreeCore(params, make, self.clock, _NEEDS, self.log)

    @property
    def joint_bytes(self) -> Use:
        """Bytes of the one pool."""
        return Use(self.joint_memory.num_bytes, self.joint_memory.num_free_bytes, self.evictable_bytes)

    @property
    def evictable_bytes(self) -> int:
        """Bytes that eviction can free."""
        core = self.tree_core
        return self.joint_memory.bytes_of(core.evictable_size(), core.mamba_evictable_size())

    def _look_up(self, params: MatchPrefixParams) -> Lease:
        """Like the base class, but report a miss if no slot is available for the copy-on-write state."""
        lease, req = super()._look_up(params), params.req
        if lease.match.source is None or not params.cow_mamba or req is None or req.kv.holds_mamba:
            return lease
        if self._has_slot_beside(lease.match.source):
            return lease
        request = lease.request
        return Lease(request, self.tree_core.hybrid.tree.match(request.path, 0, request.namespace))

    def _has_slot_beside(self, source: Node) -> bool:
        """True if a slot can be taken while `source` is in use."""
        joint, core = self.joint_memory, self.tree_core
        if self.num_lendable_bytes >= joint.state_bytes:
            return True
        num_tokens = core.memory.num_unprotected_tokens(source)
        beside = self.evictable_bytes - joint.bytes_of(num_tokens, int(not source.num_locks))
        return self.num_lendable_bytes + beside >= joint.state_bytes

    @property
    def num_lendable_bytes(self) -> int:
        """Bytes to be had without an eviction; slots that SGLang has drawn for what waits are free as well."""
        slots = self.req_to_token_pool.mamba_allocator
        num_drawn = length_hint(slots._alloc_iter) if slots._alloc_iter is not None else 0
        return self.joint_memory.num_free_bytes + self.joint_memory.bytes_of(0, num_drawn)

    def evict_for_alloc(
        self, params: EvictParams, *, allocation_reclaim_satisfied: Callable[[], bool] | None = None
    ) -> EvictResult:
        """Evict until as much more can be lent as `params` asks for, or nothing is evictable any more."""
        assert allocation_reclaim_satisfied is None, "a quota of KV and states apart"
        started_s = time.perf_counter()
        core, result = self.tree_core, EvictResult()
        wanted = {ComponentType.FULL: params.num_tokens, ComponentType.MAMBA: params.mamba_num}
        targets = [(kind, self._component_available_size(kind) + count) for kind, count in wanted.items() if count > 0]
        while num_missing_bytes := self._num_missing_bytes(targets):
            freed = self._evict_bytes(num_missing_bytes)
            if freed is None:
                break
            self._apply_eviction_result(core.drain(freed))
            result.num_tokens_evicted += freed.num_tokens
            result.mamba_num_evicted += freed.num_states
        self.update_eviction_metrics(result.num_tokens_evicted, started_s)
        return result

    def _num_missing_bytes(self, targets: list[tuple[ComponentType, int]]) -> int:
        """Bytes to free before `targets` can be lent; 0 if they can. Counts what is freed at the end of a group.

        Where SGLang may not move entries, less can be lent than bytes are free, and the next victim is one too few or
        enough: 1.
        """
        self.token_to_kv_pool_allocator.flush_deferred_full_frees()
        joint, num_missing = self.joint_memory, 0
        for kind, target in targets:
            if self._component_available_size(kind) < target:
                num_wanted = joint.bytes_of(target, 0) if kind is ComponentType.FULL else joint.bytes_of(0, target)
                num_missing = max(num_missing, num_wanted - joint.num_free_bytes, 1)
        return num_missing

    def _evict_bytes(self, num_bytes: int) -> Freed | None:
        """Evict victims one by one until `num_bytes` are freed; returns all that is freed, None if nothing can be."""
        core = self.tree_core
        freed = core.evict_one(Need.BYTES)
        while freed is not None and self.joint_memory.bytes_of(*freed) < num_bytes:
            one = core.evict_one(Need.BYTES)
            if one is None:
                break
            freed = Freed(freed.num_tokens + one.num_tokens, freed.num_states + one.num_states)
        return freed

    def _reserved(self, reqs: "list[Req]") -> int:
        """Bytes: of the slots that requests take, and of the KV that the rest of their prompts take."""
        num_tokens = sum(len(req.full_untruncated_fill_ids) - req.prefix_len + self.page_size for req in reqs)
        return self.joint_memory.bytes_of(num_tokens, super()._reserved(reqs))

    def _spares_slot(self, reserved: int, *, may_evict: bool) -> bool:
        """Compare in bytes; of those awaited the states alone are counted."""
        joint, hybrid = self.joint_memory, self.tree_core.hybrid
        evictable = self.evictable_bytes - joint.bytes_of(0, hybrid.num_awaited) if may_evict else 0
        return joint.num_free_bytes + evictable - reserved >= joint.state_bytes
