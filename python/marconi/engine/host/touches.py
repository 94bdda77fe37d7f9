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
        "what the meter counts as a victim",
        _UNTIL_HARNESS,
    ),
)

HOST_TOUCHES = (*_CONFIGURATION, *_POOLS, *_SCHEDULER)
