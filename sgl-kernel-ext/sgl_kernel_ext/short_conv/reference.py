"""The short causal convolution in torch: prefill over sequences, and one decode step.

Each channel c convolves its own last `width` inputs:

    y_t = activation(bias + sum_{j < width} weight_j x_{t - width + 1 + j})

The state of a sequence is its last width - 1 inputs, oldest first; before its first token they are zero. `checkpoint`
takes it at any token: the width - 1 inputs before it.
"""

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

from sgl_kernel_ext import varlen
from sgl_kernel_ext.arguments import require
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.state_pool import StateSlots, initial_states


class Activation(StrEnum):
    """The function applied to the sum."""

    NONE = "none"
    SILU = "silu"


def prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    cu_seqlens: Tensor,
    states: StateSlots | None = None,
    activation: Activation = Activation.SILU,
) -> Tensor:
    """Convolve whole sequences, each from its slot of `states` and back into it, or from zero without `states`.

    x (num_tokens, num_channels) of a float dtype; weight (num_channels, width) with width >= 2 and bias
    (num_channels,) of any float dtype; cu_seqlens (num_sequences + 1,) integer; a slot holds (num_channels,
    width - 1). Returns (num_tokens, num_channels) of the dtype of x, computed in float32, in float64 for float64
    inputs. Raises ValueError for other shapes and dtypes.
    """
    _require_inputs(x, weight, bias)
    num_tokens, num_channels = x.shape
    num_kept = weight.shape[1] - 1
    varlen.require_cu_seqlens(cu_seqlens, num_tokens)
    num_sequences = cu_seqlens.shape[0] - 1
    carried = initial_states(states, num_sequences, (num_channels, num_kept), x.dtype, x.device)

    # Every sequence gets its state in front of its tokens, so that one shift per tap serves the whole batch.
    owner = varlen.sequence_of_token(cu_seqlens)
    position = torch.arange(num_tokens, device=x.device) + (owner + 1) * num_kept
    places = torch.arange(num_kept, device=x.device)
    sequences = torch.arange(num_sequences, device=x.device)[:, None]
    before = cu_seqlens[:-1, None].long() + sequences * num_kept + places
    inputs = x.new_zeros(num_tokens + num_sequences * num_kept, num_channels)
    inputs[position] = x
    inputs[before] = carried.transpose(1, 2)

    dtype = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(dtype)
    total = torch.zeros(num_tokens, num_channels, dtype=dtype, device=x.device)
    for tap in range(num_kept + 1):
        total += taps[:, tap] * inputs[position - num_kept + tap].to(dtype)
    outputs = _finish(total, bias, activation).to(x.dtype)
    if states is not None:
        outputs[states.is_padding[owner]] = 0
        after = cu_seqlens[1:, None].long() + sequences * num_kept + places
        states.write(inputs[after].transpose(1, 2))
    return outputs


def checkpoint(x: Tensor, *, states: StateSlots | None, spans: Spans, pool: Tensor) -> None:
    """Write the windows of inputs that end at the ends of `spans` to their slots of `pool`.

    x (num_tokens, num_channels) of any float dtype; `states` the windows that the sequences continue from, zero where
    there is none or without `states`: call this before `prefill` writes over them; `spans` from the start of each
    sequence; pool (num_slots, num_channels, width - 1) of any float dtype and strides. Values are copied, rounded to
    the dtype of the pool.

    A window is read from its slot while others are written, so no checkpoint goes to a slot of the same pool that a
    sequence continues from. Raises ValueError for that where the slots lie on the host (on a device they are the
    allocator's word, and what such a slot ends with is undefined), for other shapes and dtypes, and for a slot outside
    the pool.
    """
    require_checkpoint(x, states, spans, pool)
    num_kept = pool.shape[2]
    rows = spans.rows()
    goes_on = states is not None and any(end - start < num_kept for _, _, start, end, _ in rows)
    before = states.read(pool.dtype) if states is not None and goes_on else None
    for sequence, _, start, end, slot in rows:
        window, num_new = pool[slot], min(end - start, num_kept)
        if num_new < num_kept:
            window[:, : num_kept - num_new] = 0 if before is None else before[sequence, :, num_new:]
        window[:, num_kept - num_new :] = x[end - num_new : end].T


def decode(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    states: StateSlots,
    activation: Activation = Activation.SILU,
) -> Tensor:
    """Run one token of every sequence: shift it into its slot and return (num_sequences, num_channels).

    Shapes, dtypes and errors are those of `prefill`, with one token a sequence.
    """
    _require_inputs(x, weight, bias)
    num_sequences, num_channels = x.shape
    states.require(num_sequences, (num_channels, weight.shape[1] - 1))
    dtype = torch.promote_types(x.dtype, torch.float32)
    inputs = torch.cat([states.read(x.dtype), x[..., None]], -1)
    states.write(inputs[..., 1:])
    outputs = _finish((inputs.to(dtype) * weight.to(dtype)).sum(-1), bias, activation)
    return outputs.masked_fill(states.is_padding[:, None], 0).to(x.dtype)


def _finish(total: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    if bias is not None:
        total = total + bias.to(total.dtype)
    return functional.silu(total) if activation is Activation.SILU else total


def require_checkpoint(x: Tensor, states: StateSlots | None, spans: Spans, pool: Tensor) -> None:
    """Raise ValueError for arguments that `checkpoint` does not take."""
    require("x", x, ("num_tokens", "num_channels"))
    require("pool", pool, ("num_slots", x.shape[1], "width - 1"))
    if pool.shape[2] < 1:
        raise ValueError(f"dimension 2 of pool must be at least 1, got {pool.shape[2]}")
    spans.require_batch(x.shape[0], pool)
    if states is None:
        return
    states.require(states.slots.shape[0], (x.shape[1], pool.shape[2]))
    spans.require_sequences("states", states.slots.shape[0])
    if states.pool.data_ptr() == pool.data_ptr() and states.slots.device.type == spans.slots.device.type == "cpu":
        for slot in sorted(set(spans.slots.tolist()) & set(states.slots.tolist())):
            raise ValueError(f"a checkpoint must go to a slot that no sequence continues from, got slot {slot}")


def _require_inputs(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    require("x", x, ("num_tokens", "num_channels"))
    require("weight", weight, (x.shape[1], "width"))
    if weight.shape[1] < 2:
        raise ValueError(f"dimension 1 of weight must be at least 2, got {weight.shape[1]}")
    if bias is not None:
        require("bias", bias, x.shape[1:])
