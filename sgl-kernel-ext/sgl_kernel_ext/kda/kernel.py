"""States at any token of a prefill of Kimi Delta Attention, in one launch.

A program makes a block (BV, BK) of one head's state for one checkpoint: it reads the chunk's start state, the
corrected values, keys and sums of decays of at most a chunk of tokens, and writes the block once. The start state is
a row of the chunk states or, for a span without a chunk, its sequence's snapshot:

    S_t = S_chunk diag(exp(G_t)) + u^T (exp(G_t - G) * k)

What is read is the chunk state and C (2 K + V) numbers a head, what is written is the state; nothing is written twice,
and no program waits for another. The differences are of sums to the end of the span, never to the end of the chunk, so
no factor is above one. A program takes a chunk's tokens in one block, or in two where exact products leave no
registers for one. Products are in float32 for float32 inputs, in TF32 for narrower ones: the corrected values are exact
there, and of the weighted keys tensor cores read the first 11 bits and drop the rest, unrounded, which takes less than
2^-10 from a term, towards zero.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.delta_rule import CHUNK_SIZE
from sgl_kernel_ext.kda.reference import require_checkpoint
from sgl_kernel_ext.launch import Launcher, num_rows, tiling
from sgl_kernel_ext.tile import BATCH_EXTENTS, SPANS, start_tile, state_tile, token_tile


def checkpoint(
    k: Tensor,
    corrected_values: Tensor,
    decay_sums: Tensor,
    chunk_states: Tensor,
    *,
    spans: Spans,
    pool: Tensor,
    log_base: float = math.e,
    snapshots: Tensor | None = None,
) -> None:
    """Run `reference.checkpoint` on an accelerator, in float32.

    Raises ValueError for too few rows of tokens, chunk states or snapshots and for a span without any; other shapes are
    the caller's word. Nothing is written for a slot outside the pool.
    """
    h0 = chunk_states if snapshots is None else snapshots
    batch = spans, log_base, snapshots is None
    if _launch_checkpoint.repeat(batch, k, corrected_values, decay_sums, chunk_states, h0, pool):
        return
    num_spans = len(spans)
    if not num_spans:
        return
    num_tokens = min(k.size(-3), corrected_values.size(-3), decay_sums.size(-3))
    num_chunks, num_snapshots = chunk_states.size(-4), num_rows(snapshots)
    if (
        num_tokens < spans.num_tokens
        or num_chunks < spans.num_chunks
        or (spans.has_no_chunk and num_snapshots < spans.num_sequences)
    ):
        require_checkpoint(k, corrected_values, decay_sums, chunk_states, spans, pool, log_base, snapshots)
    num_slots, num_heads, value_dim, key_dim = pool.shape
    tiles = tiling(value_dim, key_dim, k.dtype, corrected_values.dtype)
    _launch_checkpoint(
        batch,
        (num_spans * num_heads, *tiles.grid),
        (k, corrected_values, decay_sums, chunk_states, h0, pool),
        spans.columns,
        (
            k.stride()[-3:],
            corrected_values.stride()[-3:],
            decay_sums.stride()[-3:],
            chunk_states.stride()[-4:],
            h0.stride()[-4:],
            pool.stride(),
            math.log2(log_base),
            num_slots,
            num_chunks,
            num_snapshots,
            num_heads,
            num_heads // k.size(-2),
            value_dim,
            key_dim,
        ),
        # Not by the longest span: one compilation serves all batches.
        NB=-(-max(spans.max_tokens, CHUNK_SIZE) // tiles.largest),
        BT=tiles.largest,
        BV=tiles.rows,
        BK=tiles.columns,
        PRECISION=tiles.precision,
    )


@triton.jit(do_not_specialize=BATCH_EXTENTS, do_not_specialize_on_alignment=SPANS)
def _checkpoint_kernel(
    k,
    u,
    g,
    h,
    h0,
    pool,
    sequences,
    chunks,
    starts,
    ends,
    slots,
    s_k,
    s_u,
    s_g,
    s_h,
    s_h0,
    s_pool,
    to_log2,
    N,
    NH,
    N0,
    H,
    G,
    V,
    K,
    NB: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Make a tile (BV, BK) of a head's state.

    tensors  k keys, u corrected values, g sums of log decays, which `to_log2` takes to the base 2, h chunk states,
             h0 snapshots
    extents  N slots, NH rows of h, N0 rows of h0, H heads, G heads that share a key head, V value_dim, K key_dim;
             NB blocks of BT tokens
    indices  i_n checkpoint, i_h head, i_c chunk, i_q sequence, i_s slot; o_t tokens, o_v values, o_k key channels
    blocks   b_end g at the span's end, b_behind the log decay of each token until there
    """
    i_n, i_h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    i_s = tl.load(slots + i_n)
    if (i_s < 0) | (i_s >= N):
        return
    i_c, i_q = tl.load(chunks + i_n), tl.load(sequences + i_n)
    start, end = tl.load(starts + i_n), tl.load(ends + i_n)
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    o_k = tl.program_id(2) * BK + tl.arange(0, BK)
    m_v, m_k = o_v < V, o_k < K
    m_h = m_v[:, None] & m_k[None, :]

    p_end = g + i_h * s_g[1] + o_k * s_g[2] + (end - 1) * s_g[0]
    b_end = tl.load(p_end, mask=m_k & (end > start), other=0.0).to(tl.float32)
    b_h = start_tile(h, s_h, NH, h0, s_h0, N0, i_c, i_q, i_h, o_v, o_k, m_h)
    b_h *= tl.exp2(b_end * to_log2)[None, :]
    # One block is compiled to no loop; two are not unrolled into what spills, nor fetched ahead.
    for i_b in tl.range(NB, num_stages=1):
        o_t = start + i_b * BT + tl.arange(0, BT)
        m_t = o_t < end
        m_tk = m_t[:, None] & m_k[None, :]
        b_g = tl.load(token_tile(g, s_g, o_t, i_h, o_k), mask=m_tk, other=0.0).to(tl.float32)
        # Masked before exp: behind the span the difference is positive and may overflow.
        b_behind = tl.where(m_tk, b_end[None, :] - b_g, -float("inf"))
        b_k = tl.load(token_tile(k, s_k, o_t, i_h // G, o_k), mask=m_tk, other=0.0).to(tl.float32)
        b_k *= tl.exp2(b_behind * to_log2)
        b_u = tl.load(token_tile(u, s_u, o_t, i_h, o_v), mask=m_t[:, None] & m_v[None, :], other=0.0).to(tl.float32)
        b_h += tl.dot(tl.trans(b_u), b_k, input_precision=PRECISION)
    tl.store(state_tile(pool, s_pool, i_s, i_h, o_v, o_k), b_h.to(pool.dtype.element_ty), mask=m_h)


_launch_checkpoint = Launcher(_checkpoint_kernel)
