"""Every change that the CPU platform makes to SGLang; `marconi.engine.upstream` says how such a list is read."""

from typing import Final

from marconi.engine.touch import Group, Kind, Touch

_HERE: Final = "marconi_cpu."
_OPS: Final = "sglang.kernels.ops."


def _launcher(name: str, module: str, why: str) -> Touch:
    """A Triton launcher in whose place comes the function of that name in `MODULE.py` here."""
    return Touch(Kind.REPLACE, _OPS + name, why, f"{_HERE}{module}.{name.rpartition('.')[2]}")


LAUNCHERS = Group(
    "Launchers of the CPU platform",
    "In every process, with `SGLANG_PLATFORM=marconi_cpu`.",
    "a seam for a platform's kernels at this launcher",
    (
        _launcher("mamba.causal_conv1d_triton.causal_conv1d_fn", "convolution", "prefill of the short convolution"),
        _launcher("mamba.causal_conv1d_triton.causal_conv1d_update", "convolution", "decode of the short convolution"),
        _launcher(
            "mamba.mamba_state_scatter_triton.track_mamba_states_if_needed",
            "state_tracking",
            "a layer's decode states are copied for the prefix cache",
        ),
        _launcher(
            "mamba.mamba_state_scatter_triton.track_mamba_states_all_layers",
            "state_tracking",
            "all layers' decode states are copied for the prefix cache",
        ),
        _launcher("attention.fla.chunk.chunk_gated_delta_rule", "gated_delta_rule", "prefill of the gated delta rule"),
        _launcher(
            "attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
            "gated_delta_rule",
            "decode of the gated delta rule",
        ),
        _launcher(
            "attention.linear.fused_gdn_gating.fused_gdn_gating", "gated_delta_rule", "gates of the gated delta rule"
        ),
        _launcher(
            "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous",
            "gated_delta_rule",
            "Qwen3.5: the input projection is split",
        ),
        _launcher(
            "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat",
            "gated_delta_rule",
            "Qwen3-Next: the input projection is split",
        ),
        Touch(
            Kind.REPLACE,
            _OPS + "attention.fla.fused_norm_gate.FusedRMSNormGated.forward",
            "Qwen3-Next: the gated norm behind the recurrence",
            _HERE + "gating.fused_rms_norm_gated_forward",
        ),
        Touch(
            Kind.REPLACE,
            _OPS + "attention.fla.layernorm_gated.RMSNorm.forward",
            "Qwen3.5: the gated norm behind the recurrence",
            _HERE + "gating.rms_norm_gated_forward",
        ),
        _launcher("elementwise.elementwise.fused_sigmoid_mul", "gating", "Qwen3.5: the gate behind full attention"),
        _launcher(
            "elementwise.elementwise.fused_gate_sigmoid_mul_add",
            "gating",
            "Qwen3-Next: the gate behind the shared expert",
        ),
        _launcher("mamba.triton_ops.ssd_combined.mamba_chunk_scan_combined", "mamba2", "prefill of Mamba2"),
        _launcher("mamba.triton_ops.mamba_ssm.selective_state_update", "mamba2", "decode of Mamba2, and its drafts"),
        _launcher(
            "attention.linear.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update",
            "gated_delta_rule",
            "drafts of the gated delta rule",
        ),
        _launcher(
            "mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify",
            "state_tracking",
            "states after accepted drafts are copied to their slots",
        ),
        _launcher("speculative.spec_tree.verify_tree_greedy_func", "draft_tree", "drafts are accepted"),
        Touch(
            Kind.REPLACE,
            "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
            "entries for KV of drafts join the requests' rows",
            _HERE + "draft_slots.assign_req_to_token_pool_func",
        ),
        _launcher(
            "speculative.cache_locs.fill_front_out_cache_loc_func", "draft_slots", "slots of the KV of accepted drafts"
        ),
        _launcher(
            "speculative.eagle.fill_accept_out_cache_loc_func", "draft_slots", "where KV of accepted drafts comes from"
        ),
        _launcher("kvcache.cache_move.copy_all_layer_kv_cache_func", "draft_slots", "KV of accepted drafts is copied"),
        _launcher(
            "speculative.spec_tree.build_tree_kernel_efficient_func", "draft_tree", "the drafts of a model make a tree"
        ),
        _launcher(
            "speculative.cache_locs.assign_draft_cache_locs_contiguous_func",
            "draft_slots",
            "slots of the KV of a draft model",
        ),
        _launcher("speculative.eagle.fill_bonus_tokens_func", "draft_slots", "the token that a draft model continues"),
    ),
)

_SUB_POOL: Final = "sglang.srt.mem_cache.allocator.unified_sub_pool"
_ATTENTION: Final = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"

POOL = Group(
    "One pool on the CPU platform",
    "In every process, as above; without `--enable-unified-memory` they do nothing.",
    "an attention backend for a CPU that looks up where entries of the one pool lie",
    (
        Touch(
            Kind.AROUND,
            "sglang.srt.arg_groups.kv_cache_hook.handle_page_major_kv_layout",
            "attention by torch counts among the backends that look places up; swaps the module's "
            "`attention_backends_of` meanwhile",
            _HERE + "joint_pool.around_page_major_layout",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.arg_groups.kv_cache_hook",
            "as above, where drafts are made and verified: `_SPEC_VERIFY_AUDITED_BACKENDS`, "
            "`_SPEC_MHA_AUDITED_BACKENDS` and `TRANSLATED_MHA_RAILS` (`cpu/joint_pool.py`)",
        ),
        Touch(
            Kind.AROUND,
            "sglang.srt.platforms.interface.reject_out_of_tree_path",
            "the flag is not refused for a platform from outside",
            _HERE + "joint_pool.around_reject",
            "the platform saying whether it has the pool",
        ),
        Touch(
            Kind.AROUND,
            _ATTENTION + ".forward_extend",
            "KV is written to places, by `KVWriteLoc.for_batch`; drafts see the request's tokens and the drafts above "
            "them",
            _HERE + "tree_attention.around_forward_extend",
        ),
        Touch(Kind.AROUND, _ATTENTION + ".forward_decode", "as above", _HERE + "joint_pool.around_forward"),
        Touch(
            Kind.AROUND,
            _ATTENTION + "._run_sdpa_forward_extend",
            "KV is read from places, by the pool's `host_transfer_translate`",
            _HERE + "joint_pool.around_attention",
        ),
        Touch(Kind.AROUND, _ATTENTION + "._run_sdpa_forward_decode", "as above", _HERE + "joint_pool.around_attention"),
        Touch(
            Kind.REPLACE,
            _SUB_POOL + ".MultiEndedAllocator.set_latest_forward_done_event",
            "no pass is in flight that an entry would wait for, by `torch.cuda`, before it moves",
            _HERE + "joint_pool.forget_pass",
            "it asking the device for its stream",
        ),
        Touch(
            Kind.REPLACE,
            _SUB_POOL + ".MultiEndedAllocator.set_inflight_forward",
            "as above",
            _HERE + "joint_pool.forget_pass",
            "as above",
        ),
        Touch(
            Kind.ASSIGN,
            _SUB_POOL,
            "`alloc_extend_kernel` and `alloc_decode_kernel`: the one pool calls Triton's on a CPU, too "
            "(`cpu/paging.py`)",
            until="it calling `alloc_extend_naive` and `alloc_decode_naive` of `paged.py`, as the two pools do",
        ),
    ),
)

DEVICE = Group(
    "The device of the CPU platform",
    "In every process, as above.",
    "the model's code asking the platform",
    (
        Touch(
            Kind.SUBCLASS,
            "sglang.srt.platforms.interface.SRTPlatform",
            "`CpuPlatform` extends it",
            until="nothing: this is the seam for it",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.layers.attention.mamba.mamba",
            "`causal_conv1d_fn`, `causal_conv1d_update` and the same with `_triton`: the module defines them for its "
            "own devices only (`cpu/launchers.py`)",
            until="the module binding them on every device",
        ),
        Touch(
            Kind.ASSIGN,
            "torch.Tensor.pin_memory",
            "gives its tensor: `ScheduleBatch.prepare_for_decode` pins a host tensor without asking the platform",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.model_executor.forward_batch_info._is_cpu",
            "attention that is data parallel pads batches as SGLang's own CPU engine does, without pinned memory",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.distributed.parallel_state._is_cpu",
            "as above: ranks gather and scatter by torch's own calls",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.layers.dp_attention.memcpy_func",
            "tokens of all ranks are gathered by a copy of torch, SGLang's own for its CPU engine",
        ),
        Touch(
            Kind.AROUND,
            "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
            "waits for a request rather than keeping a core busy; swaps the controller's `soft_watchdog`, which the "
            "loop feeds before it asks its socket",
            _HERE + "launchers.around_event_loop",
            until="`--sleep-on-idle` meaning the controller, too",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend",
            "`get_cpu_graph_seq_len_fill_value`: what a padded row of such a batch counts as (`cpu/launchers.py`)",
            until="the backend having the method",
        ),
        Touch(
            Kind.AROUND,
            "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
            "a draft model may have this attention",
            _HERE + "tree_attention.around_create_backend",
            until="the factory asking the platform",
        ),
        Touch(
            Kind.SUBCLASS,
            _ATTENTION,
            "`DraftStep` extends it (`cpu/tree_attention.py`)",
            until="as above",
        ),
        Touch(Kind.OVERRIDE, _ATTENTION + ".forward_decode", "a branch of drafts sees itself", until="as above"),
        Touch(
            Kind.ASSIGN,
            "sys.modules",
            "`sgl_kernel.speculative`, with `reconstruct_indices_from_tree_mask`, which SGLang imports on every other "
            "device (`cpu/launchers.py`)",
            until="SGLang's wheel having it on a CPU",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.speculative.eagle_utils",
            "`tree_speculative_sampling_target_only`, `top_k_renorm_prob` and `top_p_renorm_prob`, by which drafts are "
            "accepted at random: None on a CPU (`cpu/launchers.py`)",
            until="kernels for them",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS",
            "`cpu`: a host tier's pools are not registered with CUDA (`cpu/host_copies.py`)",
            until="the table asking the platform",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES",
            "1 GiB, not 10, of memory that a host tier leaves to others (`cpu/host_copies.py`)",
            until="an option for it",
        ),
        *(
            Touch(
                Kind.ASSIGN,
                f"sglang.srt.mem_cache.pool_host.{module}",
                "`transfer_kv_per_layer_direct_pf_lf` and `transfer_kv_all_layer_direct_lf_pf`, which the module "
                "imports for its own devices only (`cpu/host_copies.py`)",
                until="as above",
            )
            for module in ("mha", "mamba")
        ),
        Touch(
            Kind.ASSIGN,
            "torch.get_device_module",
            "gives `torch.cpu`, not the CUDA module: `Qwen3GatedDeltaNet` asks it for the device of a norm",
        ),
        Touch(
            Kind.ASSIGN,
            "torch.cuda.synchronize",
            "does nothing: Nemotron-H's drafts wait for the device when they take over the model's embedding",
        ),
        Touch(
            Kind.ASSIGN,
            "sglang.srt.environ.envs.SGLANG_MAMBA_CONV_DTYPE",
            "the convolution's states get the model's dtype (`cpu/platform.py`)",
            until="its default following the model's dtype",
        ),
    ),
)

GROUPS: Final = (LAUNCHERS, POOL, DEVICE)
