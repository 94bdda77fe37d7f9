"""States at any token of a prefill of the gated delta rule, in one launch.

`checkpoint` needs the corrected values of the prefill. A program makes a block (BV, BK) of one head's state
for one checkpoint: it reads the chunk's start state, the corrected values and keys of at most a chunk of tokens, and
the sums of their decays, and writes the block once:

    S_t = exp(G_t) S_chunk + (exp(G_t - G) u)^T k

What is read is the chunk state and C (K + V) numbers a head, what is written is the state; nothing is written twice,
and no program waits for another. A program takes a chunk's tokens in one block, or in two where exact products leave no
registers for one. Products are in float32 for float32 inputs, in TF32 for narrower ones: the keys are exact there, and
of the weighted values tensor cores read the first 11 bits and drop the rest, unrounded, which takes less than 2^-10
from a term, towards zero.

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
from sgl_kernel_ext.delta_rule import CHUNK_SIZE
from sgl_kernel_ext.gated_delta_rule.reference import require_advance, require_checkpoint
from sgl_kernel_ext.launch import Launcher, block, num_rows, tiling
from sgl_kernel_ext.tile import BATCH_EXTENTS, SPANS, start_tile, state_tile, token_tile

_WALK_V = 8


def checkpoint(
    k: Tensor, corrected_values: Tensor, decay_sums: Tensor, chunk_states: Tensor, *, spans: Spans, pool: Tensor
) -> None:
    """Run `reference.checkpoint` on an accelerator, in float32.

    Raises ValueError for too few rows of tokens or chunk states and for a span without a chunk; other shapes are the
    caller's word. Nothing is written for a slot outside the pool.
    """
    if _launch_checkpoint.repeat(spans, k, corrected_values, decay_sums, chunk_states, pool):
        return
    num_spans = len(spans)
    if not num_spans:
        return
    num_tokens = min(k.size(-3), corrected_values.size(-3), decay_sums.size(-2))
    if num_tokens < spans.num_tokens or chunk_states.size(-4) < spans.num_chunks or spans.has_no_chunk:
        require_checkpoint(k, corrected_values, decay_sums, chunk_states, spans, pool)
    num_slots, num_heads, value_dim, key_dim = pool.shape
    tiles = tiling(value_dim, key_dim, k.dtype, corrected_values.dtype)
    _launch_checkpoint(
        spans,
        (num_spans * num_heads, *tiles.grid),
        (k, corrected_values, decay_sums, chunk_states, pool),
        spans.columns,
        (
            k.stride()[-3:],
            corrected_values.stride()[-3:],
            decay_sums.stride()[-2:],
            chunk_states.stride()[-4:],
            pool.stride(),
            num_slots,
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
    """Run `reference.advance` on an accelerator, in float32.

    Raises ValueError for too few rows of tokens, chunk states or initial states; other shapes are the caller's word.
    Nothing is written for a slot outside the pool.
    """
    # In the place of what is absent, which has no rows, stands what is there: all batches run one compilation.
    h = next(each for each in (chunk_states, initial_states, pool) if each is not None)
    h0 = h if initial_states is None else initial_states
    batch = spans, chunk_states is None, initial_states is None
    if _launch_advance.repeat(batch, k, v, g, beta, h, h0, pool):
        return
    num_spans = len(spans)
    if not num_spans:
        return
    num_chunks, num_initial = num_rows(chunk_states), num_rows(initial_states)
    if (
        min(k.size(0), v.size(0), g.size(0), beta.size(0)) < spans.num_tokens
        or num_chunks < spans.num_chunks
        or (initial_states is not None and num_initial < spans.num_sequences)
    ):
        require_advance(k, v, g, beta, chunk_states, initial_states, spans, pool)
    num_slots, num_heads, value_dim, key_dim = pool.shape
    _launch_advance(
        batch,
        (num_spans * num_heads, -(-value_dim // _WALK_V)),
        (k, v, g, beta, h, h0, pool),
        spans.columns,
        (
            k.stride(),
            v.stride(),
            g.stride(),
            beta.stride(),
            h.stride(),
            h0.stride(),
            pool.stride(),
            num_slots,
            num_chunks,
            num_initial,
            num_heads,
            num_heads // k.size(1),
            value_dim,
            key_dim,
        ),
        BV=_WALK_V,
        BK=block(key_dim, None),
    )


@triton.jit(do_not_specialize_on_alignment=SPANS)
def _checkpoint_kernel(
    k,
    u,
    g,
    h,
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
    s_pool,
    N,
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

    tensors  k keys, u corrected values, g sums of log decays, h chunk states
    extents  N slots, H heads, G heads that share a key head, V value_dim, K key_dim; NB blocks of BT tokens
    indices  i_n checkpoint, i_h head, i_c chunk, i_s slot; o_t tokens, o_v values, o_k key channels
    blocks   b_end g at the span's end, b_w what each token weighs there
    """
    i_n, i_h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    i_s = tl.load(slots + i_n)
    if (i_s < 0) | (i_s >= N):
        return
    i_c, start, end = tl.load(chunks + i_n), tl.load(starts + i_n), tl.load(ends + i_n)
    o_v = tl.program_id(1) * BV + tl.arange(0, BV)
    o_k = tl.program_id(2) * BK + tl.arange(0, BK)
    m_v, m_k = o_v < V, o_k < K
    m_h = m_v[:, None] & m_k[None, :]

    p_g = g + i_h * s_g[1]
    b_end = tl.load(p_g + (end - 1) * s_g[0], mask=end > start, other=0.0).to(tl.float32)
    b_h = tl.load(state_tile(h, s_h, i_c, i_h, o_v, o_k), mask=m_h, other=0.0).to(tl.float32)
    b_h *= tl.exp(b_end)
    # One block is compiled to no loop; two are not unrolled into what spills, nor fetched ahead.
    for i_b in tl.range(NB, num_stages=1):
        o_t = start + i_b * BT + tl.arange(0, BT)
        m_t = o_t < end
        b_g = tl.load(p_g + o_t * s_g[0], mask=m_t, other=0.0).to(tl.float32)
        # Masked before exp: behind the span the difference is positive and may overflow.
        b_w = tl.exp(tl.where(m_t, b_end - b_g, -float("inf")))
        p_u, p_k = token_tile(u, s_u, o_t, i_h, o_v), token_tile(k, s_k, o_t, i_h // G, o_k)
        b_u = tl.load(p_u, mask=m_t[:, None] & m_v[None, :], other=0.0).to(tl.float32)
        b_k = tl.load(p_k, mask=m_t[:, None] & m_k[None, :], other=0.0).to(tl.float32)
        b_h += tl.dot(tl.trans(b_u * b_w[:, None]), b_k, input_precision=PRECISION)
    tl.store(state_tile(pool, s_pool, i_s, i_h, o_v, o_k), b_h.to(pool.dtype.element_ty), mask=m_h)


@triton.jit(do_not_specialize=BATCH_EXTENTS, do_not_specialize_on_alignment=SPANS)
def _advance_kernel(
    k,
    v,
    g,
    beta,
    h,
    h0,
    pool,
    sequences,
    chunks,
    starts,
    ends,
    slots,
    s_k,
    s_v,
    s_g,
    s_beta,
    s_h,
    s_h0,
    s_pool,
    N,
    NH,
    N0,
    H,
    G,
    V,
    K,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """Walk the tokens of a span with BV values by all keys, BK, of a head's state.

    tensors  k keys, v values, g log decays, beta shares, h chunk states, h0 initial states
    extents  N slots, NH rows of h, N0 rows of h0, H heads, G heads that share a key head, V value_dim, K key_dim
    indices  i_n checkpoint, i_h head, i_c chunk, i_q sequence, i_t token, i_s slot; o_v values, o_k key channels
    blocks   b_u corrected values
    """
    i_n, i_h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    i_s = tl.load(slots + i_n)
    if (i_s < 0) | (i_s >= N):
        return
    start, end = tl.load(starts + i_n), tl.load(ends + i_n)
    o_v, o_k = tl.program_id(1) * BV + tl.arange(0, BV), tl.arange(0, BK)
    m_v, m_k = o_v < V, o_k < K
    m_h = m_v[:, None] & m_k[None, :]
    i_c, i_q = tl.load(chunks + i_n), tl.load(sequences + i_n)
    b_h = start_tile(h, s_h, NH, h0, s_h0, N0, i_c, i_q, i_h, o_v, o_k, m_h)

    p_k = k + (i_h // G) * s_k[1] + o_k * s_k[2]
    p_v = v + i_h * s_v[1] + o_v * s_v[2]
    p_g, p_beta = g + i_h * s_g[1], beta + i_h * s_beta[1]
    next_k = tl.load(p_k + start * s_k[0], mask=m_k & (start < end), other=0.0)
    next_v = tl.load(p_v + start * s_v[0], mask=m_v & (start < end), other=0.0)
    next_g = tl.load(p_g + start * s_g[0], mask=start < end, other=0.0)
    next_beta = tl.load(p_beta + start * s_beta[0], mask=start < end, other=0.0)
    for i_t in range(start, end):
        b_k, b_v = next_k.to(tl.float32), next_v.to(tl.float32)
        b_decay, b_beta = tl.exp(next_g.to(tl.float32)), next_beta.to(tl.float32)
        i_next = i_t + 1
        next_k = tl.load(p_k + i_next * s_k[0], mask=m_k & (i_next < end), other=0.0)
        next_v = tl.load(p_v + i_next * s_v[0], mask=m_v & (i_next < end), other=0.0)
        next_g = tl.load(p_g + i_next * s_g[0], mask=i_next < end, other=0.0)
        next_beta = tl.load(p_beta + i_next * s_beta[0], mask=i_next < end, other=0.0)
        b_h *= b_decay
        b_u = b_beta * (b_v - tl.sum(b_h * b_k[None, :], axis=1))
        b_h += b_u[:, None] * b_k[None, :]

    tl.store(state_tile(pool, s_pool, i_s, i_h, o_v, o_k), b_h.to(pool.dtype.element_ty), mask=m_h)


_launch_checkpoint = Launcher(_checkpoint_kernel)
_launch_advance = Launcher(_advance_kernel, num_warps=1)
