"""The touches of SGLang behind one pool for KV and states (`--enable-unified-memory`): its bytes and its admission.

Apart from the others, because the cache that they hook in comes with them.
"""

from marconi.engine.joint import admission
from marconi.engine.touch import Kind, Touch

_UNTIL_CLASS = "a public class to extend"
_UNTIL_ADMISSION = "its admission counting tracking slots, and states that may go as bytes for KV"

JOINT_TOUCHES = (
    Touch(
        "sglang.srt.mem_cache.allocator.unified_mamba.UnifiedMambaTokenToKVPoolAllocator",
        Kind.READ,
        None,
        "one pool: entries and bytes of its two sides, `allocated_count`, `flush_deferred_full_frees`",
        "a public count of its bytes",
    ),
    Touch(
        "sglang.srt.mem_cache.unified_memory_pool.UnifiedMambaSlotAllocator",
        Kind.READ,
        None,
        "slots that are drawn for all that wait, `_alloc_iter`, count as free",
        "as above",
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict_for_alloc",
        Kind.OVERRIDE,
        "(self, params, *, allocation_reclaim_satisfied=None)",
        "victims free bytes, whichever side is short; SGLang asks for KV first",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.prefill_budget.PrefillBudget",
        Kind.SUBCLASS,
        "(allocator, tree_cache, *, num_mixed_decode_tokens=0)",
        "`JointPrefillBudget` overrides `_available_and_evictable`",
        _UNTIL_ADMISSION,
    ),
    Touch(
        "sglang.srt.mem_cache.allocator.base.BaseTokenToKVPoolAllocator.create_prefill_budget",
        Kind.AROUND,
        "(self, tree_cache, *, num_mixed_decode_tokens=0)",
        "an admission goes by all bytes that may be had",
        _UNTIL_ADMISSION,
        admission.around_create_prefill_budget,
    ),
    Touch(
        "sglang.srt.managers.schedule_policy.PrefillAdder.__init__",
        Kind.AFTER,
        "(self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, rem_input_tokens, "
        "rem_chunk_tokens, num_mixed_decode_tokens=0, priority_scheduling_preemption_threshold=0, max_prefill_bs=0, "
        "max_running_requests=None, prefill_max_requests=None, prefill_delayer_single_pass=None, dllm_config=None, "
        "waiting_queue_len=0, prefill_tile_block_m=64)",
        "as above: `rem_mamba_slots`",
        _UNTIL_ADMISSION,
        admission.on_init_adder,
    ),
    Touch(
        "sglang.srt.managers.schedule_policy.PrefillAdder._mamba_gap_budget_for_req",
        Kind.AROUND,
        "(self, req, *, include_host_hit=False)",
        "a request's tracking slots count; `_mamba_slot_cost` is a slot in KV tokens",
        _UNTIL_ADMISSION,
        admission.around_gap_budget,
    ),
)
