"""States at any token of a prefill of the gated delta rule, in one launch.

`checkpoint` needs the corrected values of the prefill. A program makes a block (BLOCK_V, BLOCK_K) of one head's state
for one checkpoint: it reads the chunk's start state, the corrected values and keys of at most a chunk of tokens, and
the sums of their decays, and writes the block once:

    S_t = exp(G_t) S_chunk + (exp(G_t - G) u)^T k

What is read is the chunk state and C (K + V) numbers a head, what is written is the state; nothing is written twice,
and no program waits for another. Products are in float32 for float32 inputs, in TF32 for narrower ones: the keys are
exact there, the weighted values keep 11 bits.

`advance` needs none. A program keeps `_WALK_V` values by all keys of one head's state in the registers of one warp,
from the chunk's start state on, and walks the tokens of the span; values know nothing of each other, so a state is as
many independent walks as it has such rows. A walk is a chain of at most a chunk of steps, each a product with a key and
an outer product, so it waits more than it computes: the operands of a token are fetched while the one before is taken
in, and many small programs stand on a processor at a time. All is in float32, without tensor cores.
"""

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.gated_delta_rule.reference import require_advance, require_checkpoint
from sgl_kernel_ext.launch import block, dot_precision, largest_block, on_device_of

_WALK_V = 8


def checkpoint(
    k: Tensor, corrected_values: Tensor, decay_sums: Tensor, chunk_states: Tensor, *, spans: Spans, pool: Tensor
) -> None:
    """As `reference.checkpoint`, for tensors on an accelerator, in float32."""
    require_checkpoint(k, corrected_values, decay_sums, chunk_states, spans, pool)
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


def advance(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_states: Tensor | None,
    *,
    spans: Spans,
    pool: Tensor,
    initial_states: Tensor | None = None,
) -> None:
    """As `reference.advance`, for tensors on an accelerator, in float32."""
    require_advance(k, v, g, beta, chunk_states, initial_states, spans, pool)
    if not len(spans):
        return
    num_heads, value_dim, key_dim = pool.shape[1:]
    absent = (0, 0, 0, 0)
    with on_device_of(pool):
        _advance_kernel[(len(spans) * num_heads, triton.cdiv(value_dim, _WALK_V))](
            k,
            v,
            g,
            beta,
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
            value_dim,
            key_dim,
            *k.stride(),
            *v.stride(),
            *g.stride(),
            *beta.stride(),
            *(absent if chunk_states is None else chunk_states.stride()),
            *(absent if initial_states is None else initial_states.stride()),
            *pool.stride(),
            BLOCK_V=_WALK_V,
            BLOCK_K=block(key_dim, None),
            num_warps=1,
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

    sums = tl.load(sums_ptr + t * sums_stride_token + head * sums_stride_head, mask=is_token, other=0.0).to(tl.float32)
    last = tl.load(sums_ptr + (end - 1) * sums_stride_token + head * sums_stride_head, mask=end > start, other=0.0)
    at_end = last.to(tl.float32)
    # Masked before exp: behind the span the difference is positive and may overflow.
    weight = tl.exp(tl.where(is_token, at_end - sums, -float("inf")))

    u = tl.load(
        u_ptr + t[:, None] * u_stride_token + head * u_stride_head + v[None, :] * u_stride_dim,
        mask=is_token[:, None] & is_v[None, :],
        other=0.0,
    ).to(tl.float32)
    keys = tl.load(
        k_ptr + t[:, None] * k_stride_token + (head // group) * k_stride_head + key[None, :] * k_stride_dim,
        mask=is_token[:, None] & is_key[None, :],
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
    state *= tl.exp(at_end)
    state += tl.dot(tl.trans(u * weight[:, None]), keys, input_precision=PRECISION)
    tl.store(
        pool_ptr
        + slot * pool_stride
        + head * pool_stride_head
        + v[:, None] * pool_stride_v
        + key[None, :] * pool_stride_k,
        state.to(pool_ptr.dtype.element_ty),
        mask=is_v[:, None] & is_key[None, :],
    )


@triton.jit
def _advance_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
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
    value_dim,
    key_dim,
    k_stride_token,
    k_stride_head,
    k_stride_dim,
    v_stride_token,
    v_stride_head,
    v_stride_dim,
    g_stride_token,
    g_stride_head,
    beta_stride_token,
    beta_stride_head,
    chunk_stride,
    chunk_stride_head,
    chunk_stride_v,
    chunk_stride_k,
    initial_stride,
    initial_stride_head,
    initial_stride_v,
    initial_stride_k,
    pool_stride,
    pool_stride_head,
    pool_stride_v,
    pool_stride_k,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
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
    row = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    key = tl.arange(0, BLOCK_K)
    is_row, is_key = row < value_dim, key < key_dim
    in_state = is_row[:, None] & is_key[None, :]

    # One of the two is read, or neither: from no chunk and no initial state a sequence starts at zero.
    state = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.float32)
    if chunk_states_ptr is not None:
        state += tl.load(
            chunk_states_ptr
            + chunk * chunk_stride
            + head * chunk_stride_head
            + row[:, None] * chunk_stride_v
            + key[None, :] * chunk_stride_k,
            mask=in_state & (chunk >= 0),
            other=0.0,
        ).to(tl.float32)
    if initial_states_ptr is not None:
        state += tl.load(
            initial_states_ptr
            + sequence * initial_stride
            + head * initial_stride_head
            + row[:, None] * initial_stride_v
            + key[None, :] * initial_stride_k,
            mask=in_state & (chunk < 0),
            other=0.0,
        ).to(tl.float32)

    k_ptr += (head // group) * k_stride_head + key * k_stride_dim
    v_ptr += head * v_stride_head + row * v_stride_dim
    g_ptr += head * g_stride_head
    beta_ptr += head * beta_stride_head
    next_k = tl.load(k_ptr + start * k_stride_token, mask=is_key & (start < end), other=0.0)
    next_v = tl.load(v_ptr + start * v_stride_token, mask=is_row & (start < end), other=0.0)
    next_g = tl.load(g_ptr + start * g_stride_token, mask=start < end, other=0.0)
    next_beta = tl.load(beta_ptr + start * beta_stride_token, mask=start < end, other=0.0)
    for t in range(start, end):
        keys, value = next_k.to(tl.float32), next_v.to(tl.float32)
        decay, strength = tl.exp(next_g.to(tl.float32)), next_beta.to(tl.float32)
        following = t + 1
        next_k = tl.load(k_ptr + following * k_stride_token, mask=is_key & (following < end), other=0.0)
        next_v = tl.load(v_ptr + following * v_stride_token, mask=is_row & (following < end), other=0.0)
        next_g = tl.load(g_ptr + following * g_stride_token, mask=following < end, other=0.0)
        next_beta = tl.load(beta_ptr + following * beta_stride_token, mask=following < end, other=0.0)
        state *= decay
        corrected = strength * (value - tl.sum(state * keys[None, :], axis=1))
        state += corrected[:, None] * keys[None, :]

    tl.store(
        pool_ptr
        + slot * pool_stride
        + head * pool_stride_head
        + row[:, None] * pool_stride_v
        + key[None, :] * pool_stride_k,
        state.to(pool_ptr.dtype.element_ty),
        mask=in_state,
    )
