"""Every Triton launcher that the served families call, and what stands in for it on the CPU platform.

The families are the
gated delta rule (Qwen3.5, Qwen3-Next) and Mamba2 (Nemotron-H, Falcon-H1, Granite 4).
"""

import functools
from types import ModuleType

import torch

from marconi.engine.cpu import convolution, gated_delta_rule, gating, joint_pool, mamba2, paging, state_tracking
from marconi.engine.touch import Kind, Touch

_KERNELS = "sglang.kernels.ops."
_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_UNTIL = "a seam for a platform's kernels at this launcher"

LAUNCHERS = (
    Touch(
        _KERNELS + "mamba.causal_conv1d_triton.causal_conv1d_fn",
        Kind.REPLACE,
        "(x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, cache_indices=None, has_initial_state=None, "
        "activation='silu', pad_slot_id=-1, validate_data=False, block_table=None, **kwargs)",
        "prefill of the short convolution",
        _UNTIL,
        convolution.causal_conv1d_fn,
    ),
    Touch(
        _KERNELS + "mamba.causal_conv1d_triton.causal_conv1d_update",
        Kind.REPLACE,
        "(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None, "
        "num_accept_tokens=None, intermediate_conv_window=None, intermediate_state_indices=None, "
        "retrieve_next_token=None, retrieve_next_sibling=None, retrieve_parent_token=None, pad_slot_id=-1, "
        "metadata=None, validate_data=False)",
        "decode of the short convolution",
        _UNTIL,
        convolution.causal_conv1d_update,
    ),
    Touch(
        _KERNELS + "mamba.mamba_state_scatter_triton.track_mamba_states_if_needed",
        Kind.REPLACE,
        "(conv_states, ssm_states, cache_indices, mamba_track_mask, mamba_track_indices, batch_size, "
        "check_freed_slots=False)",
        "a layer's decode states are copied for the prefix cache",
        _UNTIL,
        state_tracking.track_mamba_states_if_needed,
    ),
    Touch(
        _KERNELS + "mamba.mamba_state_scatter_triton.track_mamba_states_all_layers",
        Kind.REPLACE,
        "(conv_states_pool, ssm_states_pool, cache_indices, mamba_track_mask, mamba_track_indices, batch_size, "
        "check_freed_slots=False)",
        "all layers' decode states are copied for the prefix cache",
        _UNTIL,
        state_tracking.track_mamba_states_all_layers,
    ),
    Touch(
        _KERNELS + "attention.fla.chunk.chunk_gated_delta_rule",
        Kind.REPLACE,
        "(q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None, cu_seqlens=None, "
        "head_first=False, use_qk_l2norm_in_kernel=False, inplace_update=True)",
        "prefill of the gated delta rule",
        _UNTIL,
        gated_delta_rule.chunk_gated_delta_rule,
    ),
    Touch(
        _KERNELS + "attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
        Kind.REPLACE,
        "(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, "
        "use_qk_l2norm_in_kernel=False)",
        "decode of the gated delta rule",
        _UNTIL,
        gated_delta_rule.fused_recurrent_gated_delta_rule_packed_decode,
    ),
    Touch(
        _KERNELS + "attention.linear.fused_gdn_gating.fused_gdn_gating",
        Kind.REPLACE,
        "(A_log, a, b, dt_bias, beta=1.0, threshold=20.0)",
        "gates of the gated delta rule",
        _UNTIL,
        gated_delta_rule.fused_gdn_gating,
    ),
    Touch(
        _KERNELS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous",
        Kind.REPLACE,
        "(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v)",
        "Qwen3.5: the input projection is split",
        _UNTIL,
        gated_delta_rule.fused_qkvzba_split_reshape_cat_contiguous,
    ),
    Touch(
        _KERNELS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat",
        Kind.REPLACE,
        "(mixed_qkvz, mixed_ba, num_heads_qk, num_heads_v, head_qk, head_v)",
        "Qwen3-Next: the input projection is split",
        _UNTIL,
        gated_delta_rule.fused_qkvzba_split_reshape_cat,
    ),
    Touch(
        _KERNELS + "attention.fla.fused_norm_gate.FusedRMSNormGated.forward",
        Kind.REPLACE,
        "(self, x, g, residual=None, prenorm=False, residual_in_fp32=False)",
        "Qwen3-Next: the gated norm behind the recurrence",
        _UNTIL,
        gating.fused_rms_norm_gated_forward,
    ),
    Touch(
        _KERNELS + "attention.fla.layernorm_gated.RMSNorm.forward",
        Kind.REPLACE,
        "(self, x, z=None)",
        "Qwen3.5: the gated norm behind the recurrence",
        _UNTIL,
        gating.rms_norm_gated_forward,
    ),
    Touch(
        _KERNELS + "elementwise.elementwise.fused_sigmoid_mul",
        Kind.REPLACE,
        "(attn_output, gate, inplace=False, quant=False)",
        "Qwen3.5: the gate behind full attention",
        _UNTIL,
        gating.fused_sigmoid_mul,
    ),
    Touch(
        _KERNELS + "elementwise.elementwise.fused_gate_sigmoid_mul_add",
        Kind.REPLACE,
        "(hidden_states, gate_weight, shared_output, final_hidden_states)",
        "Qwen3-Next: the gate behind the shared expert",
        _UNTIL,
        gating.fused_gate_sigmoid_mul_add,
    ),
    Touch(
        _KERNELS + "mamba.triton_ops.ssd_combined.mamba_chunk_scan_combined",
        Kind.REPLACE,
        "(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, "
        "chunk_indices=None, chunk_offsets=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, inf), out=None, "
        "return_final_states=False, return_varlen_states=False, return_intermediate_states=False, state_dtype=None, "
        "return_track_states=False, track_seq_idx=None, track_end_locs=None)",
        "prefill of Mamba2",
        _UNTIL,
        mamba2.mamba_chunk_scan_combined,
    ),
    Touch(
        _KERNELS + "mamba.triton_ops.mamba_ssm.selective_state_update",
        Kind.REPLACE,
        "(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, "
        "pad_slot_id=-1, out=None, disable_state_update=False, intermediate_states_buffer=None, cache_steps=None, "
        "retrieve_parent_token=None, intermediate_state_indices=None, enable_stochastic_rounding=False, "
        "cache_philox_rounds=0)",
        "decode of Mamba2",
        _UNTIL,
        mamba2.selective_state_update,
    ),
)

_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_SUB_POOL = "sglang.srt.mem_cache.allocator.unified_sub_pool"
_UNTIL_JOINT = "an attention backend for a CPU that looks up where entries of the one pool lie"

JOINT_POOL = (
    Touch(
        "sglang.srt.arg_groups.kv_cache_hook.handle_page_major_kv_layout",
        Kind.AROUND,
        "(server_args)",
        "`--enable-unified-memory`: attention by torch counts among the backends that look places up; swaps the "
        "module's `attention_backends_of` meanwhile",
        _UNTIL_JOINT,
        joint_pool.around_page_major_layout,
    ),
    Touch(
        "sglang.srt.platforms.interface.reject_out_of_tree_path",
        Kind.AROUND,
        "(platform, *, subsystem)",
        "the same is not refused for a platform from outside",
        "the platform saying whether it has the pool",
        joint_pool.around_reject,
    ),
    Touch(
        _ATTENTION + ".forward_extend",
        Kind.AROUND,
        "(self, q, k, v, layer, forward_batch, save_kv_cache=True)",
        "the same: KV is written to places, by `KVWriteLoc.for_batch`",
        _UNTIL_JOINT,
        joint_pool.around_forward,
    ),
    Touch(
        _ATTENTION + ".forward_decode",
        Kind.AROUND,
        "(self, q, k, v, layer, forward_batch, save_kv_cache=True)",
        "as above",
        _UNTIL_JOINT,
        joint_pool.around_forward,
    ),
    Touch(
        _ATTENTION + "._run_sdpa_forward_extend",
        Kind.AROUND,
        "(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, "
        "extend_seq_lens, encoder_lens=None, scaling=None, enable_gqa=False, causal=False, is_cross_attn=False, "
        "sliding_window_size=None)",
        "the same: KV is read from places, by the pool's `host_transfer_translate`",
        _UNTIL_JOINT,
        joint_pool.around_attention,
    ),
    Touch(
        _ATTENTION + "._run_sdpa_forward_decode",
        Kind.AROUND,
        "(self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens=None, "
        "scaling=None, enable_gqa=False, causal=False, is_cross_attn=False, sliding_window_size=None)",
        "as above",
        _UNTIL_JOINT,
        joint_pool.around_attention,
    ),
    Touch(
        _SUB_POOL + ".MultiEndedAllocator.set_latest_forward_done_event",
        Kind.REPLACE,
        "(self, event)",
        "the same: no pass is in flight that an entry would wait for, by `torch.cuda`, before it moves",
        "it asking the device for its stream",
        joint_pool.forget_pass,
    ),
    Touch(
        _SUB_POOL + ".MultiEndedAllocator.set_inflight_forward",
        Kind.REPLACE,
        "(self, forward_done, out_cache_loc_virtual)",
        "as above",
        "as above",
        joint_pool.forget_pass,
    ),
)

TOUCHES = (
    *LAUNCHERS,
    *JOINT_POOL,
    Touch(
        _SUB_POOL,
        Kind.ASSIGN,
        "",
        "`alloc_extend_kernel` and `alloc_decode_kernel`: the one pool calls Triton's on a CPU, too",
        "it calling `alloc_extend_naive` and `alloc_decode_naive` of `paged.py`, as the two pools do",
    ),
    Touch(
        "sglang.srt.mem_cache.allocator.paged.alloc_extend_naive",
        Kind.CALL,
        "(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, device)",
        "the former",
        "as above",
    ),
    Touch(
        "sglang.srt.mem_cache.allocator.paged.alloc_decode_naive",
        Kind.CALL,
        "(seq_lens, last_loc, free_pages, out_indices, page_size, num_new_pages)",
        "the latter",
        "as above",
    ),
    Touch(
        "sglang.srt.mem_cache.memory_pool.KVWriteLoc",
        Kind.CALL,
        None,
        "`for_batch`: the places that a batch writes to",
        _UNTIL_JOINT,
    ),
    Touch(
        _MIXER,
        Kind.ASSIGN,
        "",
        "`causal_conv1d_fn`, `causal_conv1d_update` and the same with `_triton`: the module defines them for its own "
        "devices only",
        "the module binding them on every device",
    ),
    Touch(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode",
        Kind.READ,
        "(self)",
        "pins a host tensor without asking the platform, so `Tensor.pin_memory` returns its tensor",
        "a guard there, as there is for prefill",
    ),
    Touch(
        "sglang.srt.models.qwen3_next.Qwen3GatedDeltaNet",
        Kind.READ,
        "(config, layer_id, quant_config=None, alt_stream=None, prefix='')",
        "asks `torch.get_device_module()` for the device of a norm, so that gives `torch.cpu`, not the CUDA module",
        "asking the platform for it",
    ),
    Touch(
        "sglang.srt.platforms.interface.SRTPlatform",
        Kind.SUBCLASS,
        "()",
        "`CpuPlatform` extends it",
        "nothing: this is the seam for it",
    ),
    Touch(
        "sglang.srt.platforms.interface.PlatformCapabilities",
        Kind.CALL,
        None,
        "the platform can do none of what it lists",
        "nothing: this is the seam for it",
    ),
    Touch(
        "sglang.srt.platforms.device_mixin.PlatformEnum",
        Kind.READ,
        None,
        "the platform says that it comes from outside",
        "nothing: this is the seam for it",
    ),
    Touch(
        "sglang.srt.arg_groups.model_override_base.model_config_of",
        Kind.CALL,
        "(server_args)",
        "the dtype of a checkpoint, before one is chosen to serve it in",
        "`auto` keeping float32 on a CPU",
    ),
    Touch(
        "sglang.srt.environ.envs.SGLANG_MAMBA_CONV_DTYPE",
        Kind.ASSIGN,
        "",
        "the convolution's states get the model's dtype",
        "its default following the model's dtype",
    ),
)
"""All that the CPU platform touches: its launchers, and what it depends on beside them."""


def register() -> None:
    """Put the replacements in; SGLang applies the hooks afterwards."""
    from sglang.srt.layers.attention.mamba import mamba as mixer
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for launcher in LAUNCHERS:
        HookRegistry.register(launcher.target, launcher.hook, HookType.REPLACE)
    for touch in JOINT_POOL:
        HookRegistry.register(touch.target, touch.hook, HookType[touch.kind.name])
    paging.register()
    for suffix in ("", "_triton"):
        setattr(mixer, f"causal_conv1d_fn{suffix}", convolution.causal_conv1d_fn)
        setattr(mixer, f"causal_conv1d_update{suffix}", convolution.causal_conv1d_update)
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign,assignment]
    torch.get_device_module = _device_module


@functools.cache
def _device_module(device: torch.device | str | None = None) -> ModuleType:
    """Without a device torch gives the module of the accelerator that it was built for, present or not.

    Cached as torch's own is, which its compiler counts on: SGLang compiles what applies a repetition penalty.
    """
    return getattr(torch, torch.device(device or "cpu").type)


def _pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """Host memory that no device copies from needs no pinning."""
    return tensor
