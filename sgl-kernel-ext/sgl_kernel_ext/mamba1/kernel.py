"""A selective scan that stops at given positions and stores the state there, in one launch.

A program owns a block of channels of one sequence. It scans from the sequence's start to the deepest of its positions
and writes the block whenever it comes to one: all states of a sequence cost one scan. Who owns a sequence, and where to
stop next, each program reads off the spans themselves, of which a batch has a few: nothing is sorted on the host, and
no order is asked for. There are no outputs: per token a program reads x and delta of its channels, and B.

The state stays in registers, in float32. As A is the same at every token, BLOCK_T tokens are one step, in which no
token waits for the one before it; with G the sum of delta since the step's start,

    h_end = exp(A G_end) h + sum_t exp(A (G_end - G_t)) delta_t x_t B_t

takes as many exponentials as one token after the other, and the loads of all tokens are under way together. A token
behind the stop has delta and x of zero and changes nothing.
"""

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.launch import on_device_of
from sgl_kernel_ext.mamba1.reference import require_checkpoint

_BLOCK_VALUES = 512
"""Of the state, of one program: four a thread."""
_BLOCK_TOKENS = 16
_NUM_STAGES = 3
_MIN_SPANS = 64
"""Fewer are padded: one compilation serves most batches."""


def checkpoint(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, *, initial_states: Tensor | None, spans: Spans, pool: Tensor
) -> None:
    """As `reference.checkpoint`, for tensors on an accelerator, in float32."""
    require_checkpoint(x, delta, A, B, initial_states, spans, pool)
    if not len(spans):
        return
    num_channels, state_dim = pool.shape[1:]
    block_n = triton.next_power_of_2(state_dim)
    block_c = min(max(_BLOCK_VALUES // block_n, 1), triton.next_power_of_2(num_channels))
    with on_device_of(pool):
        _checkpoint_kernel[(len(spans), triton.cdiv(num_channels, block_c))](
            x,
            delta,
            A,
            B,
            initial_states,
            pool,
            spans.sequences,
            spans.starts,
            spans.ends,
            spans.slots,
            len(spans),
            pool.shape[0],
            num_channels,
            state_dim,
            *x.stride(),
            *delta.stride(),
            *A.stride(),
            *B.stride(),
            *((0, 0, 0) if initial_states is None else initial_states.stride()),
            *pool.stride(),
            HAS_INITIAL=initial_states is not None,
            BLOCK_SPANS=max(triton.next_power_of_2(len(spans)), _MIN_SPANS),
            BLOCK_C=block_c,
            BLOCK_N=block_n,
            BLOCK_T=_BLOCK_TOKENS,
            NUM_STAGES=_NUM_STAGES,
        )


@triton.jit
def _checkpoint_kernel(
    x_ptr,
    delta_ptr,
    a_ptr,
    b_ptr,
    initial_ptr,
    pool_ptr,
    sequences_ptr,
    starts_ptr,
    ends_ptr,
    slots_ptr,
    num_spans,
    num_slots,
    num_channels,
    state_dim,
    x_stride_token,
    x_stride_channel,
    delta_stride_token,
    delta_stride_channel,
    a_stride_channel,
    a_stride_n,
    b_stride_token,
    b_stride_n,
    initial_stride,
    initial_stride_channel,
    initial_stride_n,
    pool_stride,
    pool_stride_channel,
    pool_stride_n,
    HAS_INITIAL: tl.constexpr,
    BLOCK_SPANS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    which = tl.program_id(0)
    sequence = tl.load(sequences_ptr + which)
    order = tl.arange(0, BLOCK_SPANS)
    is_own = tl.load(sequences_ptr + order, mask=order < num_spans, other=-1) == sequence
    # The program of a sequence's first span scans for all of them.
    if tl.min(tl.where(is_own, order, BLOCK_SPANS), 0) < which:
        return
    ends = tl.load(ends_ptr + order, mask=is_own, other=0)

    c = tl.program_id(1).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    n = tl.arange(0, BLOCK_N)
    is_c, is_n = c < num_channels, n < state_dim
    is_state = is_c[:, None] & is_n[None, :]
    x_ptrs = x_ptr + c[None, :] * x_stride_channel
    delta_ptrs = delta_ptr + c[None, :] * delta_stride_channel
    b_ptrs = b_ptr + n[None, :] * b_stride_n
    a = tl.load(a_ptr + c[:, None] * a_stride_channel + n[None, :] * a_stride_n, mask=is_state, other=0.0)
    rates = a.to(tl.float32) * LOG2_E
    state = tl.zeros((BLOCK_C, BLOCK_N), dtype=tl.float32)
    if HAS_INITIAL:
        state += tl.load(
            initial_ptr
            + sequence * initial_stride
            + c[:, None] * initial_stride_channel
            + n[None, :] * initial_stride_n,
            mask=is_state,
            other=0.0,
        ).to(tl.float32)

    done = tl.load(starts_ptr + which)
    for _ in range(0, tl.sum(is_own.to(tl.int32), 0)):
        stop = tl.min(tl.where(is_own, ends, 0x7FFFFFFFFFFFFFFF), 0)
        current = tl.min(tl.where(is_own & (ends == stop), order, BLOCK_SPANS), 0)
        is_own = is_own & (order != current)
        for first in tl.range(done, stop, BLOCK_T, num_stages=NUM_STAGES):
            t = first + tl.arange(0, BLOCK_T)
            is_token = t < stop
            is_input = is_token[:, None] & is_c[None, :]
            delta = tl.load(delta_ptrs + t[:, None] * delta_stride_token, mask=is_input, other=0.0).to(tl.float32)
            x = tl.load(x_ptrs + t[:, None] * x_stride_token, mask=is_input, other=0.0).to(tl.float32)
            b = tl.load(b_ptrs + t[:, None] * b_stride_token, mask=is_token[:, None] & is_n[None, :], other=0.0).to(
                tl.float32
            )
            total = tl.sum(delta, 0)
            to_end = total[None, :] - tl.cumsum(delta, 0)
            added = tl.exp2(to_end[:, :, None] * rates[None, :, :]) * (delta * x)[:, :, None] * b[:, None, :]
            state = tl.exp2(total[:, None] * rates) * state + tl.sum(added, 0)
        done = stop
        slot = tl.load(slots_ptr + current)
        tl.store(
            pool_ptr + slot * pool_stride + c[:, None] * pool_stride_channel + n[None, :] * pool_stride_n,
            state.to(pool_ptr.dtype.element_ty),
            mask=is_state & ((slot >= 0) & (slot < num_slots)),
        )
