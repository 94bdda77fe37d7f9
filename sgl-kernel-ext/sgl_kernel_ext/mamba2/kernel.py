"""States at any token of a Mamba2 prefill, in one launch.

A program makes a block (BP, BS) of one head's state for one checkpoint: it starts from the grid chunk's
state, or from the sequence's initial state where the sequence begins inside the chunk, takes in the tokens up to the
position in blocks of BT, and writes the block once:

    h_t = exp(G_t - G_before) h_start + x^T (exp(G_t - G) delta B)

G counts from the start of the grid chunk; G_before is that of the token before the span, zero where the span begins
with the chunk. What is read is the start state and C (P + N) numbers a head, what is written is the state; nothing is
written twice, and no program waits for another. Products are in float32 for float32 inputs, in TF32 for narrower ones:
x is exact there, and of the weighted B tensor cores read the first 11 bits and drop the rest, unrounded, which takes
less than 2^-10 from a term, towards zero.
"""

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.launch import Launcher, block, num_rows, tiling
from sgl_kernel_ext.mamba2.reference import require_checkpoint
from sgl_kernel_ext.tile import BATCH_EXTENTS, SPANS, start_tile, state_tile, token_tile


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
    """Run `reference.checkpoint` on an accelerator, in float32.

    Raises ValueError for too few rows of tokens, chunks or initial states and for a span longer than a chunk; other
    shapes are the caller's word. Nothing is written for a slot outside the pool.
    """
    # Absent initial states have no rows; what stands in their place lets all batches run one compilation.
    h0 = chunk_states if initial_states is None else initial_states
    batch = spans, chunk_size, initial_states is None
    if _launch_checkpoint.repeat(batch, x, delta, decay_sums, B, chunk_states, h0, pool):
        return
    num_spans = len(spans)
    if not num_spans:
        return
    num_chunks, num_initial = chunk_states.size(0), num_rows(initial_states)
    num_tokens = min(x.size(0), B.size(0), chunk_size * min(delta.size(1), decay_sums.size(1)))
    if (
        num_tokens < spans.num_tokens
        or spans.max_tokens > chunk_size
        or num_chunks < spans.num_chunks
        or (initial_states is not None and num_initial < spans.num_sequences)
    ):
        require_checkpoint(x, delta, decay_sums, B, chunk_states, initial_states, chunk_size, spans, pool)
    num_slots, num_heads, head_dim, state_dim = pool.shape
    tiles = tiling(head_dim, state_dim, x.dtype, B.dtype)
    _launch_checkpoint(
        batch,
        (num_spans * num_heads, *tiles.grid),
        (x, delta, decay_sums, B, chunk_states, h0, pool),
        spans.columns,
        (
            x.stride(),
            delta.stride(),
            decay_sums.stride(),
            B.stride(),
            chunk_states.stride(),
            h0.stride(),
            pool.stride(),
            num_slots,
            num_chunks,
            num_initial,
            num_heads,
            num_heads // B.size(1),
            head_dim,
            state_dim,
            chunk_size,
        ),
        # By the chunk and not by the longest span: one compilation serves all batches.
        BT=block(chunk_size, tiles.largest),
        BP=tiles.rows,
        BS=tiles.columns,
        PRECISION=tiles.precision,
    )


@triton.jit(do_not_specialize=BATCH_EXTENTS, do_not_specialize_on_alignment=SPANS)
def _checkpoint_kernel(
    x,
    delta,
    g,
    b,
    h,
    h0,
    pool,
    sequences,
    chunks,
    starts,
    ends,
    slots,
    s_x,
    s_delta,
    s_g,
    s_b,
    s_h,
    s_h0,
    s_pool,
    N,
    NH,
    N0,
    H,
    G,
    P,
    S,
    C,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Make a tile (BP, BS) of a head's state.

    tensors  x inputs, delta step sizes, g sums of log decays, b inflow, h chunk states, h0 initial states
    extents  N slots, NH rows of h, N0 rows of h0, H heads, G heads that share a group, P head_dim, S state_dim,
             C chunk_size
    indices  i_n checkpoint, i_h head, i_c chunk and i_q sequence before it, i_g chunk of its tokens, i_s slot;
             o_t tokens, o_p rows, o_s columns
    blocks   b_end and b_before g at the span's end and before its start, b_w what each token weighs at the end
    """
    i_n, i_h = tl.program_id(0) // H, (tl.program_id(0) % H).to(tl.int64)
    i_s = tl.load(slots + i_n)
    if (i_s < 0) | (i_s >= N):
        return
    start, end = tl.load(starts + i_n), tl.load(ends + i_n)
    o_p = tl.program_id(1) * BP + tl.arange(0, BP)
    o_s = tl.program_id(2) * BS + tl.arange(0, BS)
    m_p, m_s = o_p < P, o_s < S
    m_h = m_p[:, None] & m_s[None, :]

    i_g = start // C
    origin = i_g * C
    p_g = g + i_h * s_g[0] + i_g * s_g[1]
    p_delta = delta + i_h * s_delta[0] + i_g * s_delta[1]
    b_end = tl.load(p_g + (end - 1 - origin) * s_g[2], mask=end > start, other=0.0).to(tl.float32)
    # A span that begins inside its chunk begins with its sequence.
    is_inside = (end > start) & (start > origin)
    b_before = tl.load(p_g + (start - 1 - origin) * s_g[2], mask=is_inside, other=0.0).to(tl.float32)

    i_c, i_q = tl.load(chunks + i_n), tl.load(sequences + i_n)
    b_h = start_tile(h, s_h, NH, h0, s_h0, N0, i_c, i_q, i_h, o_p, o_s, m_h)
    b_h *= tl.exp(b_end - b_before)
    for i_t in range(start, end, BT):
        o_t = i_t + tl.arange(0, BT)
        m_t = o_t < end
        b_g = tl.load(p_g + (o_t - origin) * s_g[2], mask=m_t, other=0.0).to(tl.float32)
        b_delta = tl.load(p_delta + (o_t - origin) * s_delta[2], mask=m_t, other=0.0).to(tl.float32)
        # Masked before exp: behind the span the difference is positive and may overflow.
        b_w = tl.exp(tl.where(m_t, b_end - b_g, -float("inf"))) * b_delta
        p_x, p_b = token_tile(x, s_x, o_t, i_h, o_p), token_tile(b, s_b, o_t, i_h // G, o_s)
        b_x = tl.load(p_x, mask=m_t[:, None] & m_p[None, :], other=0.0).to(tl.float32)
        b_b = tl.load(p_b, mask=m_t[:, None] & m_s[None, :], other=0.0).to(tl.float32)
        b_h += tl.dot(tl.trans(b_x), b_b * b_w[:, None], input_precision=PRECISION)

    tl.store(state_tile(pool, s_pool, i_s, i_h, o_p, o_s), b_h.to(pool.dtype.element_ty), mask=m_h)


_launch_checkpoint = Launcher(_checkpoint_kernel)
