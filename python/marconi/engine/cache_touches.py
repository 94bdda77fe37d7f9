"""The touches of SGLang behind the cache of a hybrid model: its tree core, the prefills that are cut, its status."""

from marconi.engine import cut, endpoint, idle, joint_admission, planning
from marconi.engine.touch import Kind, Touch

_UNTIL_NOTHING = "nothing: this is the seam for it"
_UNTIL_TYPES = "a tree-core interface that is public with its types"
_UNTIL_CLASS = "a public class to extend"

CORE_TOUCHES = (
    Touch(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface",
        Kind.SUBCLASS,
        "()",
        "`MarconiTreeCore` implements it; a method that upstream adds makes the class abstract, which its tests see",
        _UNTIL_NOTHING,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.tree_core_registry.register_tree_core_backend",
        Kind.CALL,
        "(name, factory)",
        "the tree core `marconi`, chosen by `CacheInitParams.tree_core_backend`",
        _UNTIL_NOTHING,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.tree_core_registry.get_tree_core_factory",
        Kind.CALL,
        "(name)",
        "whether it is registered",
        _UNTIL_NOTHING,
    ),
    Touch(
        "sglang.srt.mem_cache.cache_init_params.CacheInitParams",
        Kind.READ,
        None,
        "pools, page size, and where the tree core is named",
        _UNTIL_NOTHING,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.MatchPrefixParams",
        Kind.READ,
        "(key, cow_mamba=False, req=None)",
        "as the interface takes it",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.MatchResult",
        Kind.CALL,
        None,
        "as the interface gives it; the fields that are left out are of host tiers and windows",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.InsertParams",
        Kind.READ,
        None,
        "as the interface takes it: `key`, `value`, `mamba_value`, `prev_prefix_len`",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.InsertResult",
        Kind.CALL,
        None,
        "as the interface gives it",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.TreeLock",
        Kind.CALL,
        "(node, receipt, swa_released=False)",
        "a request's lock moves down its path with what it has left there",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.IncLockRefResult",
        Kind.CALL,
        None,
        "a receipt: the node, and nothing skipped",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.DecLockRefParams",
        Kind.CALL,
        None,
        "a receipt, also of the lock that moves; `skipped_lock_components` with FULL in it gives back no KV",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.DecLockRefResult",
        Kind.CALL,
        "(delta=None)",
        "as the interface gives it",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.EvictParams",
        Kind.CALL,
        "(num_tokens=0, swa_num_tokens=0, mamba_num=0)",
        "a slot for a planned state",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache._dfs_weight_order",
        Kind.CALL,
        "(root_node, node_handles, resolve_node_handle)",
        "orders waiting requests by the `children` of a copy of their paths",
        "a public helper, or the interface asking for parents instead",
    ),
    Touch(
        "sglang.srt.mem_cache.events.KVCacheEventRecorder",
        Kind.CALL,
        "(*, enabled, page_size, dynamo_format=False, lora_names=None)",
        "one that records nothing",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.radix_cache.RadixKey",
        Kind.READ,
        "(token_ids, extra_key=None, is_bigram=False, limit=None, cache_salt=None)",
        '`token_ids` as an `array("q")`, whose memory is the path; `extra_key` and `cache_salt` name the space',
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.cache_action.CacheAction",
        Kind.READ,
        "",
        "type of what `end_insert` gives",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.cache_action.ComponentAction",
        Kind.READ,
        None,
        "as above",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.cache_action.FreeDeviceKV",
        Kind.CALL,
        None,
        "an insert's duplicates go back",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.component_type.ComponentType",
        Kind.READ,
        None,
        "KV is FULL, states are MAMBA",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.DriveHostEvictionResult",
        Kind.CALL,
        None,
        "an empty one",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.EvictDeviceLeafResult",
        Kind.READ,
        None,
        "type of a step that this core never takes",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.EvictDeviceNextNodeResult",
        Kind.CALL,
        None,
        "a victim's KV and state, freed in one step: no node to follow, but progress",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.InsertStepResult",
        Kind.CALL,
        None,
        "an insert is one step",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface.RadixCacheWalkResult",
        Kind.CALL,
        None,
        "as the interface gives it",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._match_tree",
        Kind.OVERRIDE,
        "(self, params)",
        "what the tree knew of a request is remembered for its plan",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.touch_prefix",
        Kind.OVERRIDE,
        "(self, key)",
        "what waits is not touched",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._finalize_match_result",
        Kind.CALL,
        "(self, params, result)",
        "as above: a hit's state is copied to the request's slot",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.on_release",
        Kind.OVERRIDE,
        "(self, req, *, checkpointed)",
        "slots of planned states that a request will not leave go back",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.lock",
        Kind.CALL,
        "(self, node_id, skip_lock_components=())",
        "the lock moves to the deepest state that the request has left",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.unlock",
        Kind.CALL,
        "(self, lock)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict_for_alloc",
        Kind.CALL,
        "(self, params, *, allocation_reclaim_satisfied=None)",
        "a slot for a planned state",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._evict",
        Kind.OVERRIDE,
        "(self, params, available_size_targets=None, *, allocation_reclaim_satisfied=None)",
        "victims without a walk's bookkeeping, their memory given back at once; upstream's own for a joint reclaim",
        "a walk in the tree core's own hands",
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._component_available_size",
        Kind.CALL,
        "(self, component_type)",
        "whether an allocation's target is reached, as upstream asks",
        "as above",
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.update_eviction_metrics",
        Kind.CALL,
        "(self, num_evicted, start_time)",
        "what upstream measures of an eviction",
        "as above",
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.EvictResult",
        Kind.CALL,
        "(num_tokens_evicted=0, swa_num_tokens_evicted=0, mamba_num_evicted=0)",
        "what has gone",
        _UNTIL_TYPES,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._apply_eviction_result",
        Kind.CALL,
        "(self, result)",
        "a state on probation gives its slot to a younger one",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_cache.components.mamba.MambaComponent._select_finished_checkpoint",
        Kind.CALL,
        "(self, req, token_ids_len)",
        "with pages of several tokens: which tracked state a finished request leaves",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool.free_mamba_cache",
        Kind.CALL,
        "(self, req, mamba_ping_pong_track_buffer_to_keep=None)",
        "frees what the tree did not take; where it took the working slot, an empty tensor is named as that",
        "the pool freeing tracking slots alone",
    ),
    Touch(
        "sglang.srt.mem_cache.allocation.ensure_mamba_capacity",
        Kind.READ,
        "(req_to_token_pool, reqs, tree_cache)",
        "the slots that SGLang is about to take are left to it; counted as there",
        _UNTIL_CLASS,
    ),
)

_UNTIL_CHECKPOINTS = "a way to ask a prefill for states at given positions"

CUT_TOUCHES = (
    Touch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend",
        Kind.AROUND,
        "(self)",
        "the states that a prefill is to leave are planned, and their slots taken, before it takes memory",
        _UNTIL_CHECKPOINTS,
        planning.around_prepare_for_extend,
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
        Kind.AROUND,
        "(self, req)",
        "a prefill tracks no state on SGLang's own grid",
        _UNTIL_CHECKPOINTS,
        planning.around_track,
    ),
    Touch(
        "sglang.srt.managers.schedule_batch._MambaRadixCacheV2TrackEntry",
        Kind.CALL,
        "(track_mask, track_position, track_seqlen)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        Kind.AFTER,
        "(batch, model_runner, *, capture_hidden_mode=None, return_hidden_states_before_norm, "
        "extend_position_info=None, spec_mrope_positions=None, kv_loc_plan=None, write_cols=None)",
        "the plan is left with the linear backend for this batch, which is known by its `extend_seq_lens_cpu`",
        _UNTIL_CHECKPOINTS,
        cut.on_init_new,
    ),
    Touch(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.init_forward_metadata",
        Kind.AFTER,
        "(self, forward_batch)",
        "the passes of a prefill that is cut get metadata of their own: copies of the `ForwardBatch` with other "
        "lengths, given to the linear backend's own `init_forward_metadata`",
        _UNTIL_CHECKPOINTS,
        cut.on_init_forward_metadata,
    ),
    Touch(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.forward",
        Kind.AROUND,
        "(self, q=None, k=None, v=None, layer=None, forward_batch=None, save_kv_cache=True, mixed_qkv=None, a=None, "
        "b=None, **kwargs)",
        "a recurrent layer runs in passes",
        _UNTIL_CHECKPOINTS,
        cut.around_hybrid_forward,
    ),
    Touch(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.Mamba2AttnBackend.forward",
        Kind.AROUND,
        "(self, mixer, hidden_states, output, layer_id, forward_batch, mup_vector=None, use_triton_causal_conv=False)",
        "as above; models call it by itself",
        _UNTIL_CHECKPOINTS,
        cut.around_mamba2_forward,
    ),
)

STATUS_TOUCHES = (
    Touch(
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        Kind.AFTER,
        "(self, recv_req)",
        "the cache's status joins what SGLang's HTTP process is told; read there: its `scheduler.tree_cache`, and "
        "`internal_state` of the answer",
        "a way for a cache to add to it",
        endpoint.on_get_internal_state,
    ),
    Touch(
        "sglang.srt.entrypoints.http_server",
        Kind.READ,
        None,
        "its `app` gets the route `/marconi`; its `_global_state.tokenizer_manager` asks the schedulers",
        "a documented way to add a route",
    ),
    Touch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.get_internal_state",
        Kind.CALL,
        "(self)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.observability.metrics_collector.radix_cache_metric_labels",
        Kind.CALL,
        "(cache_type, parallel, dp_attention_enabled)",
        "the labels that SGLang's own cache metrics have",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.runtime_context.get_parallel",
        Kind.CALL,
        "()",
        "as above; its `dp_rank` tells replicas apart",
        "as above",
    ),
    Touch(
        "sglang.srt.runtime_context.get_observability",
        Kind.CALL,
        "()",
        "as above: the operator's `extra_metric_labels`",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter._maybe_log_idle_metrics",
        Kind.AFTER,
        "(self)",
        "an idle scheduler calls it again and again: our metrics are set, and what the tuner decided is adopted; read "
        "there: its `scheduler.tree_cache`",
        "a method of a cache that an idle scheduler calls",
        idle.after_idle_metrics,
    ),
)

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
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._component_available_size",
        Kind.CALL,
        "(self, component_type)",
        "what either side can lend, as SGLang counts it for a target",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.update_eviction_metrics",
        Kind.CALL,
        "(self, num_evicted, start_time)",
        "SGLang's own metrics of evictions",
        _UNTIL_CLASS,
    ),
    Touch(
        "sglang.srt.mem_cache.base_prefix_cache.EvictResult",
        Kind.CALL,
        "(num_tokens_evicted=0, swa_num_tokens_evicted=0, mamba_num_evicted=0)",
        "as `evict_for_alloc` gives it",
        _UNTIL_TYPES,
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
        "(self, tree_cache, *, num_mixed_decode_tokens)",
        "an admission goes by all bytes that may be had",
        _UNTIL_ADMISSION,
        joint_admission.around_create_prefill_budget,
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
        joint_admission.on_init_adder,
    ),
    Touch(
        "sglang.srt.managers.schedule_policy.PrefillAdder._mamba_gap_budget_for_req",
        Kind.AROUND,
        "(self, req, *, include_host_hit=False)",
        "a request's tracking slots count; `_mamba_slot_cost` is a slot in KV tokens",
        _UNTIL_ADMISSION,
        joint_admission.around_gap_budget,
    ),
)

SCHEDULER_TOUCHES = (*CUT_TOUCHES, *STATUS_TOUCHES)
"""What a scheduler of a hybrid model hooks into, when its cache is built."""
