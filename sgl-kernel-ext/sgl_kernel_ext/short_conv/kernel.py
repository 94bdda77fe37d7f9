"""Windows of a short convolution that end at any token, in one launch.

A program writes a block of channels of one window, place by place: an input of the sequence or, before its first, what
the window that it continues from holds. A window is width - 1 inputs, so what is read and written is a few bytes a
channel; a block lies along the channels, which are side by side in the inputs. Values are only copied: they have the
bits of their source where the dtypes are one.
"""

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.launch import on_device_of
from sgl_kernel_ext.short_conv.reference import require_checkpoint
from sgl_kernel_ext.state_pool import StateSlots

_BLOCK_CHANNELS = 256


def checkpoint(x: Tensor, *, states: StateSlots | None, spans: Spans, pool: Tensor) -> None:
    """As `reference.checkpoint`, for tensors on an accelerator."""
    require_checkpoint(x, states, spans, pool)
    if not len(spans):
        return
    num_channels, num_kept = pool.shape[1:]
    has = None if states is None else states.has_initial_state
    with on_device_of(pool):
        _checkpoint_kernel[(len(spans), triton.cdiv(num_channels, _BLOCK_CHANNELS))](
            x,
            None if states is None else states.pool,
            None if states is None else states.slots,
            has,
            pool,
            spans.sequences,
            spans.starts,
            spans.ends,
            spans.slots,
            0 if states is None else states.pool.shape[0],
            pool.shape[0],
            num_channels,
            *x.stride(),
            *((0, 0, 0) if states is None else states.pool.stride()),
            0 if states is None else states.slots.stride(0),
            0 if has is None else has.stride(0),
            *pool.stride(),
            NUM_KEPT=num_kept,
            HAS_STATES=states is not None,
            HAS_MASK=has is not None,
            BLOCK_C=_BLOCK_CHANNELS,
        )


@triton.jit
def _checkpoint_kernel(
    x_ptr,
    initial_ptr,
    initial_slots_ptr,
    has_initial_ptr,
    pool_ptr,
    sequences_ptr,
    starts_ptr,
    ends_ptr,
    slots_ptr,
    num_initial_slots,
    num_slots,
    num_channels,
    x_stride_token,
    x_stride_channel,
    initial_stride,
    initial_stride_channel,
    initial_stride_place,
    initial_slots_stride,
    has_initial_stride,
    pool_stride,
    pool_stride_channel,
    pool_stride_place,
    NUM_KEPT: tl.constexpr,
    HAS_STATES: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    which = tl.program_id(0)
    slot = tl.load(slots_ptr + which)
    if (slot < 0) | (slot >= num_slots):
        return
    start = tl.load(starts_ptr + which)
    end = tl.load(ends_ptr + which)
    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel = c < num_channels

    if HAS_STATES:
        sequence = tl.load(sequences_ptr + which)
        initial_slot = tl.load(initial_slots_ptr + sequence * initial_slots_stride).to(tl.int64)
        continues = (initial_slot >= 0) & (initial_slot < num_initial_slots)
        if HAS_MASK:
            continues = continues & (tl.load(has_initial_ptr + sequence * has_initial_stride) != 0)

    for place in tl.static_range(NUM_KEPT):
        token = end - NUM_KEPT + place
        is_input = token >= start
        value = tl.load(
            x_ptr + token * x_stride_token + c * x_stride_channel, mask=is_channel & is_input, other=0.0
        ).to(pool_ptr.dtype.element_ty)
        if HAS_STATES:
            # As many inputs as the sequence has given have pushed out as many of its window.
            before = tl.load(
                initial_ptr
                + initial_slot * initial_stride
                + c * initial_stride_channel
                + (place + end - start) * initial_stride_place,
                mask=is_channel & (continues & (token < start)),
                other=0.0,
            ).to(pool_ptr.dtype.element_ty)
            value = tl.where(is_input, value, before)
        tl.store(
            pool_ptr + slot * pool_stride + c * pool_stride_channel + place * pool_stride_place,
            value,
            mask=is_channel,
        )
