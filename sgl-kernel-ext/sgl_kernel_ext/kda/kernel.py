"""States at any token of a prefill of Kimi Delta Attention, in one launch.

A program makes a block (BLOCK_V, BLOCK_K) of one head's state for one checkpoint: it reads the chunk's start state, the
corrected values, keys and sums of decays of at most a chunk of tokens, and writes the block once:

    S_t = S_chunk diag(exp(G_t)) + u^T (exp(G_t - G) * k)

What is read is the chunk state and C (2 K + V) numbers a head, what is written is the state; nothing is written twice,
and no program waits for another. The differences are of sums to the end of the span, never to the end of the chunk, so
no factor is above one. Products are in float32 for float32 inputs, in TF32 for narrower ones: the corrected values are
exact there, the weighted keys keep 11 bits.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.kda.reference import require_checkpoint
from sgl_kernel_ext.launch import block, dot_precision, largest_block, on_device_of


def checkpoint(
    k: Tensor,
    corrected_values: Tensor,
    decay_sums: Tensor,
    chunk_states: Tensor,
    *,
    spans: Spans,
    pool: Tensor,
    log_base: float = math.e,
) -> None:
    """As `reference.checkpoint`, for tensors on an accelerator, in float32."""
    require_checkpoint(k, corrected_values, decay_sums, chunk_states, spans, pool, log_base)
    if not len(spans):
        return
    num_heads, value_dim, key_dim = pool.shape[1:]
    precision = dot_precision(k, corrected_values)
    largest = largest_block(precision)
    block_v, block_k = block(value_dim, largest), block(key_dim, largest)
    grid = (len(spans) * num_heads, triton.cdiv(value_dim, block_v), triton.cdiv(key_dim, block_k))
    with on_device_of(pool):
        _checkpoint_kernel[grid](
            k,
            corrected_values,
            decay_sums,
            chunk_states,
            pool,
            spans.chunks,
            spans.starts,
            spans.ends,
            spans.slots,
            math.log2(log_base),
            pool.shape[0],
            num_heads,
            num_heads // k.shape[1],
            value_dim,
            key_dim,
            *k.stride(),
            *corrected_values.stride(),
            *decay_sums.stride(),
            *chunk_states.stride(),
            *pool.stride(),
            BLOCK_T=block(spans.max_tokens, None),
            BLOCK_V=block_v,
            BLOCK_K=block_k,
            PRECISION=precision,
        )


@triton.jit
def _checkpoint_kernel(
    k_ptr,
    u_ptr,
    sums_ptr,
    chunk_states_ptr,
    pool_ptr,
    chunks_ptr,
    starts_ptr,
    ends_ptr,
    slots_ptr,
    to_log2,
    num_slots,
    num_heads,
    group,
    value_dim,
    key_dim,
    k_stride_token,
    k_stride_head,
    k_stride_dim,
    u_stride_token,
    u_stride_head,
    u_stride_dim,
    sums_stride_token,
    sums_stride_head,
    sums_stride_dim,
    chunk_stride,
    chunk_stride_head,
    chunk_stride_v,
    chunk_stride_k,
    pool_stride,
    pool_stride_head,
    pool_stride_v,
    pool_stride_k,
    BLOCK_T: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    key = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    t = start + tl.arange(0, BLOCK_T)
    is_token, is_v, is_key = t < end, v < value_dim, key < key_dim
    is_token_key = is_token[:, None] & is_key[None, :]

    sums_ptr += head * sums_stride_head + key * sums_stride_dim
    sums = tl.load(sums_ptr[None, :] + t[:, None] * sums_stride_token, mask=is_token_key, other=0.0)
    at_end = tl.load(sums_ptr + (end - 1) * sums_stride_token, mask=is_key & (end > start), other=0.0).to(tl.float32)
    # Masked before exp: behind the span the difference is positive and may overflow.
    behind = tl.where(is_token_key, at_end[None, :] - sums.to(tl.float32), -float("inf"))
    keys = tl.load(
        k_ptr + t[:, None] * k_stride_token + (head // group) * k_stride_head + key[None, :] * k_stride_dim,
        mask=is_token_key,
        other=0.0,
    ).to(tl.float32)
    keys *= tl.exp2(behind * to_log2)
    u = tl.load(
        u_ptr + t[:, None] * u_stride_token + head * u_stride_head + v[None, :] * u_stride_dim,
        mask=is_token[:, None] & is_v[None, :],
        other=0.0,
    ).to(tl.float32)
    state = tl.load(
        chunk_states_ptr
        + chunk * chunk_stride
        + head * chunk_stride_head
        + v[:, None] * chunk_stride_v
        + key[None, :] * chunk_stride_k,
        mask=is_v[:, None] & is_key[None, :],
        other=0.0,
    ).to(tl.float32)
    state *= tl.exp2(at_end * to_log2)[None, :]
    state += tl.dot(tl.trans(u), keys, input_precision=PRECISION)
    tl.store(
        pool_ptr
        + slot * pool_stride
        + head * pool_stride_head
        + v[:, None] * pool_stride_v
        + key[None, :] * pool_stride_k,
        state.to(pool_ptr.dtype.element_ty),
        mask=is_v[:, None] & is_key[None, :],
    )
