"""States at any token of a Mamba2 prefill, in one launch.

A program makes a block (BLOCK_P, BLOCK_N) of one head's state for one checkpoint: it starts from the grid chunk's
state, or from the sequence's initial state where the sequence begins inside the chunk, takes in the tokens up to the
position in blocks of BLOCK_T, and writes the block once:

    h_t = exp(G_t - G_before) h_start + x^T (exp(G_t - G) delta B)

G counts from the start of the grid chunk; G_before is that of the token before the span, zero where the span begins
with the chunk. What is read is the start state and C (P + N) numbers a head, what is written is the state; nothing is
written twice, and no program waits for another. Products are in float32 for float32 inputs, in TF32 for narrower ones:
x is exact there, the weighted B keep 11 bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.launch import block, dot_precision, largest_block, on_device_of
from sgl_kernel_ext.mamba2.reference import require_checkpoint


def checkpoint(
    x: Tensor,
    delta: Tensor,
    decay_sums: Tensor,
    B: Tensor,
    chunk_states: Tensor,
    *,
    initial_states: Tensor | None,
    chunk_size: int,
    spans: Spans,
    pool: Tensor,
) -> None:
    """As `reference.checkpoint`, for tensors on an accelerator, in float32."""
    require_checkpoint(x, delta, decay_sums, B, chunk_states, initial_states, chunk_size, spans, pool)
    if not len(spans):
        return
    num_heads, head_dim, state_dim = pool.shape[1:]
    precision = dot_precision(x, B)
    largest = largest_block(precision)
    block_p, block_n = block(head_dim, largest), block(state_dim, largest)
    grid = (len(spans) * num_heads, triton.cdiv(head_dim, block_p), triton.cdiv(state_dim, block_n))
    with on_device_of(pool):
        _checkpoint_kernel[grid](
            x,
            delta,
            decay_sums,
            B,
            chunk_states,
            initial_states,
            pool,
            spans.sequences,
            spans.chunks,
            spans.starts,
            spans.ends,
            spans.slots,
            pool.shape[0],
            num_heads,
            num_heads // B.shape[1],
            head_dim,
            state_dim,
            chunk_size,
            *x.stride(),
            *delta.stride(),
            *decay_sums.stride(),
            *B.stride(),
            *chunk_states.stride(),
            *((0, 0, 0, 0) if initial_states is None else initial_states.stride()),
            *pool.stride(),
            HAS_INITIAL=initial_states is not None,
            # By the chunk and not by the longest span: one compilation serves all batches.
            BLOCK_T=block(chunk_size, largest),
            BLOCK_P=block_p,
            BLOCK_N=block_n,
            PRECISION=precision,
        )


@triton.jit
def _checkpoint_kernel(
    x_ptr,
    delta_ptr,
    sums_ptr,
    b_ptr,
    chunk_states_ptr,
    initial_ptr,
    pool_ptr,
    sequences_ptr,
    chunks_ptr,
    starts_ptr,
    ends_ptr,
    slots_ptr,
    num_slots,
    num_heads,
    group,
    head_dim,
    state_dim,
    chunk_size,
    x_stride_token,
    x_stride_head,
    x_stride_p,
    delta_stride_head,
    delta_stride_chunk,
    delta_stride_place,
    sums_stride_head,
    sums_stride_chunk,
    sums_stride_place,
    b_stride_token,
    b_stride_group,
    b_stride_n,
    chunk_stride,
    chunk_stride_head,
    chunk_stride_p,
    chunk_stride_n,
    initial_stride,
    initial_stride_head,
    initial_stride_p,
    initial_stride_n,
    pool_stride,
    pool_stride_head,
    pool_stride_p,
    pool_stride_n,
    HAS_INITIAL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    which = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    slot = tl.load(slots_ptr + which)
    if (slot < 0) | (slot >= num_slots):
        return
    chunk = tl.load(chunks_ptr + which)
    start = tl.load(starts_ptr + which)
    end = tl.load(ends_ptr + which)
    p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_p, is_n = p < head_dim, n < state_dim
    is_state = is_p[:, None] & is_n[None, :]

    grid_chunk = start // chunk_size
    origin = grid_chunk * chunk_size
    delta_ptr += head * delta_stride_head + grid_chunk * delta_stride_chunk
    sums_ptr += head * sums_stride_head + grid_chunk * sums_stride_chunk
    x_ptr += head * x_stride_head
    b_ptr += (head // group) * b_stride_group

    at_end = tl.load(sums_ptr + (end - 1 - origin) * sums_stride_place, mask=end > start, other=0.0).to(tl.float32)
    # A span that begins inside its chunk begins with its sequence.
    is_inside = (end > start) & (start > origin)
    before = tl.load(sums_ptr + (start - 1 - origin) * sums_stride_place, mask=is_inside, other=0.0).to(tl.float32)

    state = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
    if chunk >= 0:
        state = tl.load(
            chunk_states_ptr
            + chunk * chunk_stride
            + head * chunk_stride_head
            + p[:, None] * chunk_stride_p
            + n[None, :] * chunk_stride_n,
            mask=is_state,
            other=0.0,
        ).to(tl.float32)
    elif HAS_INITIAL:
        state = tl.load(
            initial_ptr
            + tl.load(sequences_ptr + which) * initial_stride
            + head * initial_stride_head
            + p[:, None] * initial_stride_p
            + n[None, :] * initial_stride_n,
            mask=is_state,
            other=0.0,
        ).to(tl.float32)
    state *= tl.exp(at_end - before)

    for first in range(start, end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        is_token = t < end
        place = t - origin
        sums = tl.load(sums_ptr + place * sums_stride_place, mask=is_token, other=0.0).to(tl.float32)
        delta = tl.load(delta_ptr + place * delta_stride_place, mask=is_token, other=0.0).to(tl.float32)
        # Masked before exp: behind the span the difference is positive and may overflow.
        weight = tl.exp(tl.where(is_token, at_end - sums, -float("inf"))) * delta
        x = tl.load(
            x_ptr + t[:, None] * x_stride_token + p[None, :] * x_stride_p,
            mask=is_token[:, None] & is_p[None, :],
            other=0.0,
        ).to(tl.float32)
        b = tl.load(
            b_ptr + t[:, None] * b_stride_token + n[None, :] * b_stride_n,
            mask=is_token[:, None] & is_n[None, :],
            other=0.0,
        ).to(tl.float32)
        state += tl.dot(tl.trans(x), b * weight[:, None], input_precision=PRECISION)

    tl.store(
        pool_ptr
        + slot * pool_stride
        + head * pool_stride_head
        + p[:, None] * pool_stride_p
        + n[None, :] * pool_stride_n,
        state.to(pool_ptr.dtype.element_ty),
        mask=is_state,
    )
