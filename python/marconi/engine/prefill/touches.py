"""The touches of SGLang behind the states that a prefill keeps: the plan, the layers, the kernels' operands.

The kernels are hooked into where SGLang runs its own; the CPU platform replaces the launchers above them, and calls
`operands.py` itself.
"""

from marconi.engine.prefill import hooks, operands, planning
from marconi.engine.touch import Kind, Touch

_UNTIL_CHECKPOINTS = "a way to ask a prefill for states at given positions"

_UNTIL_QUEUE = "the queue's order, and whether a request waits, being asked of the cache"

PREFILL_TOUCHES = (
    Touch(
        "sglang.srt.managers.schedule_policy.SchedulePolicy.calc_priority",
        Kind.AFTER,
        "(self, waiting_queue, running_batch=None, processed_tokens=0)",
        "the prompts that wait are known to the cache before one of them is computed",
        _UNTIL_QUEUE,
        planning.on_calc_priority,
    ),
    Touch(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        Kind.AROUND,
        "(self, req, has_chunked_req, truncation_align_size)",
        "a request whose prefix is being computed waits for its state: it is passed over (`AddReqResult.CONTINUE`), "
        "and the slot that its match took goes back; read there: `can_run_list`, `running_batch` and `tree_cache`",
        _UNTIL_QUEUE,
        planning.around_add_one_req,
    ),
    Touch(
        "sglang.srt.managers.schedule_policy.AddReqResult",
        Kind.READ,
        None,
        "as above",
        "as above",
    ),
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
        hooks.on_init_new,
    ),
    Touch(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.init_forward_metadata",
        Kind.AFTER,
        "(self, forward_batch)",
        "how a batch keeps its states is chosen with its metadata; passes of a prefill that is cut get metadata of "
        "their own: copies of the `ForwardBatch` with other lengths, given to the backend's `init_forward_metadata`",
        _UNTIL_CHECKPOINTS,
        hooks.on_init_forward_metadata,
    ),
    Touch(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend.forward",
        Kind.AROUND,
        "(self, q=None, k=None, v=None, layer=None, forward_batch=None, save_kv_cache=True, mixed_qkv=None, a=None, "
        "b=None, **kwargs)",
        "a recurrent layer runs in passes, or keeps states of what its kernels leave",
        _UNTIL_CHECKPOINTS,
        hooks.around_hybrid_forward,
    ),
    Touch(
        "sglang.srt.layers.attention.hybrid_linear_attn_backend.Mamba2AttnBackend.forward",
        Kind.AROUND,
        "(self, mixer, hidden_states, output, layer_id, forward_batch, mup_vector=None, use_triton_causal_conv=False)",
        "as above; models call it by itself",
        _UNTIL_CHECKPOINTS,
        hooks.around_mamba2_forward,
    ),
)

_KERNELS = "sglang.kernels.ops."
_UNTIL_OPERANDS = "kernels that write states at given tokens themselves"

KERNEL_TOUCHES = (
    Touch(
        "sglang.srt.layers.attention.mamba.causal_conv1d.causal_conv1d_fn",
        Kind.AROUND,
        "(x, weight, bias=None, query_start_loc=None, cache_indices=None, has_initial_state=None, conv_states=None, "
        "activation='silu', pad_slot_id=-1, **kwargs)",
        "windows of the short convolution inside a prefill, from its inputs; it is given its states by keyword",
        _UNTIL_OPERANDS,
        operands.around_convolution,
    ),
    Touch(
        _KERNELS + "mamba.causal_conv1d_triton.causal_conv1d_fn",
        Kind.AROUND,
        "(x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, cache_indices=None, has_initial_state=None, "
        "activation='silu', pad_slot_id=-1, validate_data=False, block_table=None, **kwargs)",
        "as above",
        "as above",
        operands.around_convolution,
    ),
    Touch(
        _KERNELS + "attention.fla.chunk_delta_h.chunk_gated_delta_rule_fwd_h",
        Kind.AFTER,
        "(k, w, u, g=None, gk=None, initial_state=None, initial_state_indices=None, save_new_value=True, "
        "cu_seqlens=None, chunk_indices=None, use_exp2=False, inplace_update=True, track_state=None, "
        "track_chunk_idx=None, chunk_offsets=None)",
        "states inside a prefill of the gated delta rule or KDA, from the chunk states and corrected values it returns",
        _UNTIL_OPERANDS,
        operands.on_chunk_states,
    ),
    Touch(
        _KERNELS + "attention.fla.chunk_intra.chunk_kda_fwd_intra",
        Kind.AFTER,
        "(q, k, v, gk=None, beta=None, scale=None, cu_seqlens=None, chunk_size=64, chunk_indices=None, "
        "safe_gate=False, fuse_recompute=False, fuse_diagonal=False)",
        "KDA's keys, which the former is given scaled to the end of their chunk",
        _UNTIL_OPERANDS,
        operands.on_kda_intra,
    ),
    Touch(
        "sglang.srt.layers.attention.linear.kernels.gdn_flashinfer.FlashInferGDNKernel.extend",
        Kind.AROUND,
        "(self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, state_checkpoint_cu_starts=None, "
        "num_state_checkpoints=0, state_checkpoint_every_n_tokens=0, **kwargs)",
        "FlashInfer is asked for the states after each chunk; states inside a prefill go on from them",
        _UNTIL_OPERANDS,
        operands.around_flashinfer,
    ),
    Touch(
        _KERNELS + "attention.fla.l2norm.gdn_prefill_qkv_prepare_fwd",
        Kind.AFTER,
        "(q, k, v, eps=1e-06)",
        "the keys of unit length that FlashInfer is given",
        _UNTIL_OPERANDS,
        operands.on_flashinfer_inputs,
    ),
    Touch(
        _KERNELS + "mamba.triton_ops.ssd_chunk_state.chunk_state_varlen",
        Kind.AFTER,
        "(B, x, dt, dA_cumsum, cu_seqlens, chunk_states, initial_states=None)",
        "states inside a prefill of Mamba2, from its operands",
        _UNTIL_OPERANDS,
        operands.on_varlen_states,
    ),
)
"""What a scheduler hooks into beside them, off the CPU platform."""
