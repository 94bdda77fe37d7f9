"""Inkling's short convolutions, which add their input to what they convolve, on `sgl_kernel_ext.short_conv`.

A layer has four of them, each with windows of its own; a pool keeps a window token by token, (num_slots, width - 1,
num_channels). A prefill convolves first and writes its windows afterwards, in two calls; where SGLang tracks a window
for the prefix cache, a third copies it out of the inputs.

Upstream: `sglang/srt/models/inkling_common/kernels/sconv.py`, `sglang/srt/models/inkling_common/sconv.py` and
`sglang/kernels/ops/mamba/mamba_state_indices_triton.py`.
"""

import torch
from torch import Tensor
from torch.nn import functional

from marconi_cpu.arguments import require_absent, unsupported
from sgl_kernel_ext import short_conv, state_copy
from sgl_kernel_ext.short_conv import Activation
from sgl_kernel_ext.state_pool import StateSlots

PAD_SLOT = -1


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    sconv_cache: Tensor,
    cache_mask: Tensor,
    safe_idx: Tensor,
    cu: Tensor,
    si: Tensor,
    activation: str | None = None,
    use_residual: bool = True,
    is_decode: bool = False,
) -> Tensor:
    """Convolve a prefill's x (num_tokens, num_channels), and leave the windows as they are.

    `cu` are the sequences' bounds, `safe_idx` their slots, and `cache_mask` is false where one starts from nothing.
    Not read: `si` names the sequence of each token, as `cu` does.
    """
    require_absent("causal_conv1d", is_decode=is_decode)
    num_sequences = len(safe_idx)
    before = StateSlots(_by_channel(sconv_cache)[safe_idx], torch.arange(num_sequences), cache_mask.view(-1))
    convolved = short_conv.prefill(
        x.float(), weight, None, cu_seqlens=cu, states=before, activation=_activation(activation)
    )
    return _finish(convolved, x, use_residual)


def update_sconv_cache(
    x: Tensor, sconv_cache: Tensor, cache_indices: Tensor, has_initial_state: Tensor, query_start_loc: Tensor
) -> None:
    """Write the window at the end of each sequence of a prefill to its slot; padding and empty sequences have none."""
    num_kept, bounds = sconv_cache.shape[1], query_start_loc.tolist()
    rows = zip(cache_indices.tolist(), has_initial_state.tolist(), bounds, bounds[1:], strict=False)
    for slot, continues, start, end in rows:
        if slot == PAD_SLOT or start == end:
            continue
        before = sconv_cache[slot] if continues else torch.zeros_like(sconv_cache[slot])
        sconv_cache[slot] = torch.cat([before, x[start:end].to(before.dtype)])[-num_kept:]


def fused_causal_conv1d_update_decode(
    x: Tensor,
    weight: Tensor,
    sconv_cache: Tensor,
    cache_indices: Tensor,
    cache_mask: Tensor,
    activation: str | None = None,
    use_residual: bool = True,
    track_mask: Tensor | None = None,
    track_indices: Tensor | None = None,
) -> Tensor:
    """Convolve one token of every sequence and shift it into its window, which is copied where `track_mask` is set.

    Not read: `cache_mask` is false for padding, as its slot says.
    """
    windows = _by_channel(sconv_cache)
    states = StateSlots(windows, cache_indices)
    convolved = short_conv.decode(x.float(), weight, None, states=states, activation=_activation(activation))
    if track_mask is not None and track_indices is not None:
        num_tracked = len(track_mask)
        sources = torch.where(track_mask, cache_indices[:num_tracked].long(), PAD_SLOT)
        state_copy.copy(windows, sources, track_indices[:num_tracked].long())
    return _finish(convolved, x, use_residual)


def fused_gather_scatter_to_sconv_cache(
    hidden_states: Tensor, sconv_cache: Tensor, track_conv_indices: Tensor, mask: Tensor, dst_indices: Tensor
) -> None:
    """Copy the inputs at `track_conv_indices` (batch, width - 1) to the slots `dst_indices`, where `mask` is set."""
    sconv_cache[dst_indices[mask].long()] = hidden_states[track_conv_indices[mask].long()].to(sconv_cache.dtype)


def fused_decode_sconv_metadata(
    B: int, cache_indices: Tensor, out: dict[str, Tensor] | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The operands that a decoding batch's convolutions share: a sequence has one token and continues from its slot."""
    require_absent("fused_decode_sconv_metadata", out=out)
    shared = {
        "cache_mask": (cache_indices != PAD_SLOT)[:, None, None],
        "safe_idx": cache_indices.clamp(min=0).long(),
        "cu": torch.arange(B + 1),
        "si": torch.arange(B, dtype=torch.int32),
    }
    return torch.arange(B + 1, dtype=torch.int32), torch.ones(B, dtype=torch.bool), shared


def fused_replay_state_indices(
    *,
    req_pool_indices: Tensor,
    mamba_index_mapping: Tensor,
    out_state_indices: Tensor,
    valid_bs: int,
    total_bs: int,
    v2p: Tensor | None = None,
) -> Tensor:
    """Write the slots of a batch's requests; `v2p` are the places of slots that are names."""
    if valid_bs != total_bs:
        raise unsupported("fused_replay_state_indices", f"{total_bs} rows of which {valid_bs} are requests")
    slots = mamba_index_mapping[req_pool_indices[:valid_bs].long()].long()
    out_state_indices[:total_bs] = slots if v2p is None else v2p[slots]
    return out_state_indices


def swiglu(z_btn: Tensor) -> Tensor:
    """Gate the odd channels by the even ones, as Inkling's dense layers have them beside each other."""
    wide = z_btn.float()
    return (functional.silu(wide[..., ::2]) * wide[..., 1::2]).to(z_btn.dtype)


def _by_channel(windows: Tensor) -> Tensor:
    """View windows as (num_slots, num_channels, width - 1)."""
    return windows.transpose(1, 2)


def _activation(activation: str | None) -> Activation:
    return Activation.NONE if activation is None else Activation.SILU


def _finish(convolved: Tensor, x: Tensor, use_residual: bool) -> Tensor:
    return (convolved + x.float() if use_residual else convolved).to(x.dtype)
