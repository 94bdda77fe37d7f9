"""States at any token under a constant decay, in one launch.

A program makes a block (BLOCK_K, BLOCK_V) of one head's state for one checkpoint: it reads the state that the span
starts from, adds the span's keys and values block of tokens by block of tokens, each weighed by its distance to the
end, and writes the block once:

    S_n = exp(n log_decay) S_0 + (exp((n - i) log_decay) k_i)^T v

A span may be a whole sequence. Tokens, and a start, so far behind that their weight is zero in float32 are not read: a
head that forgets fast reads few tokens however long the span. No program waits for another. Products are in float32 for
float32 inputs, in TF32 for narrower ones: the values are exact there, the weighted keys keep 11 bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.launch import block, dot_precision, largest_block, on_device_of
from sgl_kernel_ext.simple_decay.reference import require_checkpoint


def checkpoint(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    chunk_states: Tensor | None,
    *,
    spans: Spans,
    pool: Tensor,
    initial_states: Tensor | None = None,
) -> None:
    """As `reference.checkpoint`, for tensors on an accelerator, in float32."""
    require_checkpoint(k, v, log_decay, chunk_states, initial_states, spans, pool)
    if not len(spans):
        return
    num_heads, key_dim, value_dim = pool.shape[1:]
    precision = dot_precision(k, v)
    largest = largest_block(precision)
    block_k, block_v = block(key_dim, largest), block(value_dim, largest)
    absent = (0, 0, 0, 0)
    with on_device_of(pool):
        _checkpoint_kernel[(len(spans) * num_heads, triton.cdiv(key_dim, block_k), triton.cdiv(value_dim, block_v))](
            k,
            v,
            log_decay,
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
            num_heads // k.shape[1],
            key_dim,
            value_dim,
            *k.stride(),
            *v.stride(),
            *log_decay.stride(),
            *(absent if chunk_states is None else chunk_states.stride()),
            *(absent if initial_states is None else initial_states.stride()),
            *pool.stride(),
            BLOCK_T=block(spans.max_tokens, largest),
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            PRECISION=precision,
        )


@triton.jit
def _checkpoint_kernel(
    k_ptr,
    v_ptr,
    log_decay_ptr,
    chunk_states_ptr,
    initial_states_ptr,
    pool_ptr,
    sequences_ptr,
    chunks_ptr,
    starts_ptr,
    ends_ptr,
    slots_ptr,
    num_slots,
    num_heads,
    group,
    key_dim,
    value_dim,
    k_stride_token,
    k_stride_head,
    k_stride_dim,
    v_stride_token,
    v_stride_head,
    v_stride_dim,
    log_decay_stride,
    chunk_stride,
    chunk_stride_head,
    chunk_stride_k,
    chunk_stride_v,
    initial_stride,
    initial_stride_head,
    initial_stride_k,
    initial_stride_v,
    pool_stride,
    pool_stride_head,
    pool_stride_k,
    pool_stride_v,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    which = tl.program_id(0) // num_heads
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    slot = tl.load(slots_ptr + which)
    if (slot < 0) | (slot >= num_slots):
        return
    sequence = tl.load(sequences_ptr + which)
    chunk = tl.load(chunks_ptr + which)
    start = tl.load(starts_ptr + which)
    end = tl.load(ends_ptr + which)
    log_decay = tl.load(log_decay_ptr + head * log_decay_stride).to(tl.float32)
    key = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_v = key < key_dim, v < value_dim
    # exp(-104) is below half of float32's least number: what lies further behind weighs nothing, the start included.
    reach = tl.minimum(104.0 / tl.maximum(-log_decay, 1e-30), 1e9).to(tl.int64) + 1
    in_state = is_key[:, None] & is_v[None, :] & (end - start <= reach)

    # One of the two is read, or neither: from no chunk and no initial state a sequence starts at zero.
    state = tl.zeros((BLOCK_K, BLOCK_V), dtype=tl.float32)
    if chunk_states_ptr is not None:
        state += tl.load(
            chunk_states_ptr
            + chunk * chunk_stride
            + head * chunk_stride_head
            + key[:, None] * chunk_stride_k
            + v[None, :] * chunk_stride_v,
            mask=in_state & (chunk >= 0),
            other=0.0,
        ).to(tl.float32)
    if initial_states_ptr is not None:
        state += tl.load(
            initial_states_ptr
            + sequence * initial_stride
            + head * initial_stride_head
            + key[:, None] * initial_stride_k
            + v[None, :] * initial_stride_v,
            mask=in_state & (chunk < 0),
            other=0.0,
        ).to(tl.float32)
    state *= tl.exp(log_decay * (end - start).to(tl.float32))

    k_ptr += (head // group) * k_stride_head + key * k_stride_dim
    v_ptr += head * v_stride_head + v * v_stride_dim
    for first in range(tl.maximum(start, end - reach), end, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        is_token = t < end
        # Masked before exp: behind the span the exponent is positive and may overflow.
        weight = tl.exp(tl.where(is_token, log_decay * (end - 1 - t).to(tl.float32), -float("inf")))
        keys = tl.load(
            k_ptr[None, :] + t[:, None] * k_stride_token, mask=is_token[:, None] & is_key[None, :], other=0.0
        ).to(tl.float32)
        values = tl.load(
            v_ptr[None, :] + t[:, None] * v_stride_token, mask=is_token[:, None] & is_v[None, :], other=0.0
        ).to(tl.float32)
        state += tl.dot(tl.trans(keys * weight[:, None]), values, input_precision=PRECISION)

    tl.store(
        pool_ptr
        + slot * pool_stride
        + head * pool_stride_head
        + key[:, None] * pool_stride_k
        + v[None, :] * pool_stride_v,
        state.to(pool_ptr.dtype.element_ty),
        mask=is_key[:, None] & is_v[None, :],
    )
