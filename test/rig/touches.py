"""The touches of SGLang behind the host replay: its configuration, its pools, and what its scheduler calls."""

from marconi.engine.touch import Kind, Touch

_UNTIL_HARNESS = "a public way to drive a cache without a model"
_UNTIL_SCHEDULER = "the scheduler's steps as functions of their own"

_CONFIGURATION = (
    Touch(
        "sglang.srt.server_args.ServerArgs",
        Kind.CALL,
        None,
        "flags of a server with a tiny model and pools of the wanted sizes",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.runtime_context.publish",
        Kind.CALL,
        "(server_args, *, role, hf_config=None, ranks=None)",
        "makes them the process's configuration, from which the cache classes read",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.runtime_context.SpawnRanks",
        Kind.CALL,
        "(world_rank, dp_rank=None, gpu_id=None)",
        "the only rank of one",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.runtime_context.get_server_args",
        Kind.CALL,
        "()",
        "the same, for the context from which a cache is built",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.runtime_context.process_model_config",
        Kind.CALL,
        "()",
        "the model's configuration, read while its folder is there; `mamba_chunk_size` for the tracked positions",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.runtime_context.mamba_cache_chunk_size",
        Kind.CALL,
        "()",
        "as above: it is remembered after the first call",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.runtime_context.mamba_track_grid",
        Kind.CALL,
        "(tree_page)",
        "how often a state is tracked while decoding",
        _UNTIL_SCHEDULER,
    ),
)

_POOLS = (
    Touch(
        "sglang.srt.configs.mamba_utils.Mamba2CacheParams",
        Kind.CALL,
        "(*, dtype=<factory>, layers, shape)",
        "states of a few bytes",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.configs.mamba_utils.Mamba2StateDType",
        Kind.CALL,
        "(*, conv, temporal)",
        "as above",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.configs.mamba_utils.Mamba2StateShape",
        Kind.CALL,
        None,
        "as above",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool",
        Kind.CALL,
        None,
        "rows and state slots",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.HybridLinearKVPool",
        Kind.CALL,
        None,
        "KV of two bytes a token",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator",
        Kind.CALL,
        "(size, dtype, device, kvcache, need_sort)",
        "KV in pages of one token",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator",
        Kind.CALL,
        "(size, page_size, dtype, device, kvcache, need_sort)",
        "KV in larger pages",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_memory_pool.init_unified_mamba_pools",
        Kind.CALL,
        None,
        "one pool for both, of entries of 32 and 2,048 bytes; its `_raw` buffer holds what a model would write",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.mem_cache.cache_init_params.CacheInitParams",
        Kind.CALL,
        None,
        "what a scheduler tells a cache",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.mem_cache.registry.TreeCacheBuildContext",
        Kind.CALL,
        None,
        "as above",
        _UNTIL_HARNESS,
    ),
)

_SCHEDULER = (
    Touch(
        "sglang.srt.managers.schedule_batch.Req",
        Kind.CALL,
        None,
        "a request: `init_next_round_input`, `prefix_len`, `extend_end`, `lock`, `kv` and the outcome of sampling",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.FINISH_LENGTH",
        Kind.CALL,
        "(length)",
        "how a request ends",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.sampling.sampling_params.SamplingParams",
        Kind.CALL,
        None,
        "the length of an answer",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend",
        Kind.CALL,
        "(self, req)",
        "which position stock's `extra_buffer` tracks in a prefill; `self` is a stand-in",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch._collect_deferred_mamba_cow_and_clear",
        Kind.CALL,
        "(self, reqs)",
        "a hit's state counts as copied; `self` is a stand-in",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.mem_cache.allocation.alloc_for_extend",
        Kind.CALL,
        "(batch)",
        "slots and KV of a prefill; `batch` is a stand-in",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.mem_cache.allocation.alloc_token_slots",
        Kind.CALL,
        "(tree_cache, num_tokens)",
        "KV of decoding",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.mem_cache.allocation.alloc_paged_token_slots_decode",
        Kind.CALL,
        "(tree_cache, seq_lens, seq_lens_cpu, last_loc, token_per_req=1, req_pool_indices=None, batch=None)",
        "as above, with larger pages",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.mem_cache.common.checkpoint_kv_cache",
        Kind.CALL,
        "(req, tree_cache)",
        "what a chunk has computed joins the tree",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.mem_cache.common.release_kv_cache",
        Kind.CALL,
        "(req, tree_cache, *, checkpoint)",
        "the end of a request",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._mamba_prefix_cache_update",
        Kind.READ,
        "(self, req, batch, result, i, known_boundary=False)",
        "how tracking slots take turns while decoding; done by the driver itself",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._evict",
        Kind.READ,
        "(self, params, available_size_targets=None, *, allocation_reclaim_satisfied=None)",
        "what the meter times as an eviction",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._evict_device_next_node",
        Kind.READ,
        "(self, component_type, tracker)",
        "what the meter counts as a victim of stock's",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict",
        Kind.CALL,
        "(self, params)",
        "a victim of the forest, timed",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.insert",
        Kind.CALL,
        "(self, params)",
        "a trunk or a leaf of the forest",
        _UNTIL_HARNESS,
    ),
    Touch("sglang.srt.mem_cache.base_prefix_cache.InsertParams", Kind.CALL, None, "as above", "as above"),
    Touch("sglang.srt.mem_cache.radix_cache.RadixKey", Kind.CALL, None, "as above", "as above"),
)

_CROWD = (
    Touch(
        "sglang.srt.managers.schedule_policy.PrefillAdder",
        Kind.CALL,
        "(page_size, tree_cache, token_to_kv_pool_allocator, running_batch, new_token_ratio, rem_input_tokens, "
        "rem_chunk_tokens, num_mixed_decode_tokens=0, priority_scheduling_preemption_threshold=0, max_prefill_bs=0, "
        "max_running_requests=None, prefill_max_requests=None, prefill_delayer_single_pass=None, dllm_config=None, "
        "waiting_queue_len=0, prefill_tile_block_m=64)",
        "which of several waiting requests are admitted, and how much of each is prefilled",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        Kind.CALL,
        "(self, req, has_chunked_req, truncation_align_size)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_chunked_req",
        Kind.CALL,
        "(self, req)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.mem_cache.allocator.mamba.MambaSlotAllocator.alloc_group_begin",
        Kind.CALL,
        "(self, num_reqs)",
        "as above: slots of what may be admitted are taken at once",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.init_new",
        Kind.CALL,
        "(reqs, req_to_token_pool, token_to_kv_pool_allocator, tree_cache, model_config, enable_overlap, "
        "spec_algorithm, chunked_req=None, dllm_config=None)",
        "several requests at a time",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm",
        Kind.READ,
        None,
        "as above: none",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.check_decode_mem",
        Kind.CALL,
        "(self, selected_indices=None)",
        "whether the next token of all of them fits",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.retract_decode",
        Kind.CALL,
        "(self)",
        "and if not, which give their memory back and wait again",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.mem_cache.allocation.alloc_for_decode",
        Kind.CALL,
        "(batch, token_per_req)",
        "KV of the next token of all of them",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.Req.update_finish_state",
        Kind.CALL,
        "(self, new_accepted_len=1)",
        "whether a token, the length or an abort ends a request",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.FINISH_ABORT",
        Kind.CALL,
        "(message=None, status_code=None, err_type=None)",
        "how an abort ends it",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run",
        Kind.READ,
        "(self, running_batch, last_batch)",
        "the order of a scheduler's steps; done by the driver itself",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.scheduler.Scheduler._get_new_batch_prefill_raw",
        Kind.READ,
        "(self, prefill_delayer_single_pass, running_batch)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.scheduler.Scheduler.update_running_batch",
        Kind.READ,
        "(self, batch)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.scheduler.Scheduler.abort_request",
        Kind.READ,
        "(self, recv_req)",
        "where an abort finds a request; done by the driver itself",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.scheduler.Scheduler.process_pending_chunked_abort",
        Kind.READ,
        "(self)",
        "as above",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.scheduler.Scheduler.flush_cache",
        Kind.READ,
        "(self, empty_cache=True)",
        "what a flush empties; done by the driver itself",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ".SchedulerBatchResultProcessor._handle_finish_state_updated_req",
        Kind.READ,
        "(self, req, batch, result, i, logits_output)",
        "how tracking slots take turns under overlap; done by the driver itself",
        _UNTIL_SCHEDULER,
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.MambaPool.copy_from",
        Kind.READ,
        "(self, src_indices, dst_indices)",
        "copies of states that stock makes are seen, to tell what each slot contains",
        _UNTIL_HARNESS,
    ),
    Touch(
        "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker.self_check_during_busy",
        Kind.READ,
        "(self)",
        "the sum that must be the pool's size while requests run",
        _UNTIL_HARNESS,
    ),
)

HOST_TOUCHES = (*_CONFIGURATION, *_POOLS, *_SCHEDULER, *_CROWD)
