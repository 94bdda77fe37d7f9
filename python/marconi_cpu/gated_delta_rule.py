"""SGLang's gated delta rule on `sgl_kernel_ext.gated_delta_rule`.

Upstream: `sglang/kernels/ops/attention/fla/{chunk,fused_recurrent}.py`,
`sglang/kernels/ops/attention/triton_gdn_fused_proj.py` and
`sglang/kernels/ops/attention/linear/{fused_gdn_gating,fused_sigmoid_gating_recurrent}.py`. States are (num_value_heads,
value_dim, key_dim); query and key heads are normalised to unit length here, as upstream does inside its kernels.
"""

import torch
from torch import Tensor
from torch.nn import functional

from marconi.engine.faults import fails_open
from marconi.engine.prefill.operands import keep_gated_delta_rule
from marconi_cpu.arguments import require_absent, unsupported
from marconi_cpu.draft_tree import states_along
from sgl_kernel_ext import gated_delta_rule
from sgl_kernel_ext.state_pool import StateSlots

_NORM_EPS = 1e-6


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Prefill; inputs (1, num_tokens, ...), returns (outputs, None, the state before every 64-token chunk).

    Outputs are zero past the last sequence. Final states are written to their slots of `initial_state` if
    `inplace_update`.
    """
    require_absent("chunk_gated_delta_rule", head_first=head_first)
    if cu_seqlens is None:
        raise unsupported("chunk_gated_delta_rule", "a batch without cu_seqlens")
    if q.shape[0] != 1:
        raise ValueError(f"q must be (1, num_tokens, num_key_heads, key_dim), got {tuple(q.shape)}")
    states = None
    if initial_state is not None:
        slots = initial_state_indices
        if slots is None:
            slots = torch.arange(cu_seqlens.shape[0] - 1)
        states = StateSlots(initial_state if inplace_update else initial_state.clone(), slots)
    num_tokens = int(cu_seqlens[-1])
    query, key, value, log_decay, strength = (x[0, :num_tokens] for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = _unit_length(query), _unit_length(key)
    result = gated_delta_rule.prefill(
        query, key, value.to(key.dtype), log_decay, strength, cu_seqlens=cu_seqlens, states=states, scale=scale
    )
    fails_open(keep_gated_delta_rule)(key, result.corrected_values, result.decay_sums, result.chunk_states)
    outputs = torch.zeros_like(v)
    outputs[0, :num_tokens] = result.outputs
    return outputs, None, result.chunk_states[None]


def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of every sequence; mixed_qkv (batch, q + k + v), writes out (batch, 1, num_value_heads, value_dim)."""
    num_heads, value_dim, key_dim = initial_state.shape[-3:]
    keys_width = (mixed_qkv.shape[1] - num_heads * value_dim) // 2
    query, key, value = mixed_qkv.split([keys_width, keys_width, num_heads * value_dim], -1)
    query, key = query.unflatten(-1, (-1, key_dim)), key.unflatten(-1, (-1, key_dim))
    if use_qk_l2norm_in_kernel:
        query, key = _unit_length(query), _unit_length(key)
    log_decay, strength = fused_gdn_gating(A_log, a, b, dt_bias)
    out[:, 0] = gated_delta_rule.decode(
        query,
        key,
        value.unflatten(-1, (num_heads, value_dim)).to(key.dtype),
        log_decay[0],
        strength[0],
        states=StateSlots(initial_state, ssm_state_indices),
        scale=scale,
    )
    return out, initial_state


def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
    match_cutedsl_decode: bool = False,
) -> Tensor:
    """Drafts of every sequence; inputs (1, batch * num_nodes, ...), returns outputs of the shape of v.

    States stay as they are: the one after each node is kept in its row of `intermediate_states_buffer`. Not read:
    `cu_seqlens` says that every sequence has `cache_steps` nodes.
    """
    launcher = "fused_sigmoid_gating_delta_rule_update"
    require_absent(
        launcher,
        is_kda=is_kda,
        lower_bound=lower_bound,
        cache_ring=cache_ring,
        replayssm_rawv=replayssm_rawv,
        replayssm_rawk=replayssm_rawk,
        replayssm_g=replayssm_g,
        replayssm_beta=replayssm_beta,
        match_cutedsl_decode=match_cutedsl_decode,
    )
    if intermediate_states_buffer is None or intermediate_state_indices is None or not disable_state_update:
        raise unsupported(launcher, "a call that updates states")
    num_nodes = v.shape[1] if cache_steps is None else cache_steps
    if use_qk_l2norm_in_kernel:
        q, k = _unit_length(q), _unit_length(k)
    log_decay, strength = fused_gdn_gating(A_log, a, b, dt_bias, softplus_beta, softplus_threshold)
    query, key, value, log_decay, strength = (
        x[0].unflatten(0, (-1, num_nodes)) for x in (q, k, v.to(k.dtype), log_decay, strength)
    )

    def step(node: int, states: StateSlots) -> Tensor:
        inputs = (x[:, node] for x in (query, key, value, log_decay, strength))
        return gated_delta_rule.decode(*inputs, states=states, scale=scale)

    before = StateSlots(initial_state_source, initial_state_indices[: value.shape[0]]).read(initial_state_source.dtype)
    rows = intermediate_state_indices[: value.shape[0]]
    outputs = states_along(before, intermediate_states_buffer, rows, retrieve_parent_token, step)
    return outputs.reshape(v.shape).to(v.dtype)


def fused_gdn_gating(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = 20.0
) -> tuple[Tensor, Tensor]:
    """The gates (1, batch, num_value_heads) in float32: log of the decay, and the share of a value that is written."""
    step_size = functional.softplus(a.float() + dt_bias.float(), beta, threshold)
    return (-A_log.float().exp() * step_size)[None], b.float().sigmoid()[None]


def fused_qkvzba_split_reshape_cat_contiguous(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split [q | k | v | z] and [b | a] into (q | k | v), z (num_tokens, num_heads_v, head_v), b and a."""
    values_width = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + values_width, values_width], -1)
    b, a = mixed_ba.split(num_heads_v, -1)
    return qkv.contiguous(), z.unflatten(-1, (num_heads_v, head_v)).contiguous(), b.contiguous(), a.contiguous()


def fused_qkvzba_split_reshape_cat(
    mixed_qkvz: Tensor, mixed_ba: Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same split where every key head holds its own [q | k | v | z] and [b | a], one after the other."""
    group = num_heads_v // num_heads_qk
    parts = mixed_qkvz.unflatten(-1, (num_heads_qk, -1)).split([head_qk, head_qk, group * head_v, group * head_v], -1)
    query, key, value, z = (part.flatten(1) for part in parts)
    b, a = (part.flatten(1) for part in mixed_ba.unflatten(-1, (num_heads_qk, -1)).split(group, -1))
    return torch.cat([query, key, value], -1), z.unflatten(-1, (num_heads_v, head_v)), b, a


def _unit_length(x: Tensor) -> Tensor:
    """Heads divided by their length, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _NORM_EPS)
