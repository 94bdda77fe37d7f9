"""The gated norms and the gated attention output of SGLang's hybrid models, in torch.

Upstream: `sglang/kernels/ops/attention/fla/{fused_norm_gate,layernorm_gated}.py` and
`sglang/kernels/ops/elementwise/elementwise.py`. Computed in float32, returned in the dtype of the input. The first
argument of a norm is upstream's module.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from marconi_cpu.arguments import require_absent, unsupported


def fused_rms_norm_gated_forward(
    module: Any,
    x: Tensor,
    g: Tensor,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Tensor:
    """norm(x) * activation(g), the norm over the last dimension."""
    require_absent("FusedRMSNormGated.forward", residual=residual, prenorm=prenorm, residual_in_fp32=residual_in_fp32)
    normed = _normed(x.float(), module.weight, module.bias, x.shape[-1], module.eps)
    return (normed * _gate(g.reshape(x.shape), module.activation)).to(x.dtype)


def rms_norm_gated_forward(module: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    """norm(x) * activation(z), or norm(x * activation(z)) unless norm_before_gate; group_size values share a norm."""
    group_size = x.shape[-1] if module.group_size is None else module.group_size
    wide = x.float()
    gate = None if z is None else _gate(z.reshape(x.shape), module.activation)
    if gate is not None and not module.norm_before_gate:
        wide = wide * gate
    normed = _normed(wide, module.weight, module.bias, group_size, module.eps)
    if gate is not None and module.norm_before_gate:
        normed = normed * gate
    return normed.to(x.dtype)


def fused_sigmoid_mul(attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False) -> Tensor:
    """attn_output * sigmoid(gate), the gate flattened to the shape of attn_output."""
    require_absent("fused_sigmoid_mul", quant=quant)
    gated = (attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()).to(attn_output.dtype)
    return attn_output.copy_(gated) if inplace else gated


def fused_gate_sigmoid_mul_add(
    hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor
) -> None:
    """Add shared_output * sigmoid(hidden_states . gate_weight) to final_hidden_states, all (num_tokens, hidden)."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()
    final_hidden_states += (gate[:, None] * shared_output.float()).to(final_hidden_states.dtype)


def _normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, group_size: int, eps: float) -> Tensor:
    grouped = x.unflatten(-1, (-1, group_size))
    normed = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).flatten(-2)
    if weight is not None:
        normed = normed * weight.float()
    return normed if bias is None else normed + bias.float()


def _gate(z: Tensor, activation: str) -> Tensor:
    if activation in ("swish", "silu"):
        return functional.silu(z.float())
    if activation == "sigmoid":
        return z.float().sigmoid()
    raise unsupported("a gated norm", f"activation={activation!r}")
