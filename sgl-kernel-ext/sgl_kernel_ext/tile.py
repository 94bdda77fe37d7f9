"""Tiles of a batch's tokens and of states, for the Triton kernels.

Kernels name what they hold as flash-linear-attention does: `i_*` an index, `o_*` offsets, `m_*` a mask, `p_*` pointers,
`b_*` a block of values; `s_*` are a tensor's strides, and capitals are extents.

A kernel is compiled for the alignment of each pointer and for integers that are 1 or multiples of 16. What varies from
batch to batch is kept out of that, so that all batches of a model run one compilation. Triton looks into tuples in any
case: what stands in them, strides, is the model's.
"""

import triton
import triton.language as tl

SPANS = ("sequences", "chunks", "starts", "ends", "slots")
"""The vectors of `Spans.columns`, wherever in memory a batch keeps them."""
BATCH_EXTENTS = ("NH", "N0")
"""Rows of the states that spans start from."""


@triton.jit
def token_tile(base, s, o_t, i_h, o_d):
    """Pointers to channels o_d of head i_h of tokens o_t."""
    return base + o_t[:, None] * s[0] + i_h * s[1] + o_d[None, :] * s[2]


@triton.jit
def state_tile(base, s, i_row, i_h, o_r, o_c):
    """Pointers to rows o_r and columns o_c of head i_h of state i_row."""
    return base + i_row * s[0] + i_h * s[1] + o_r[:, None] * s[2] + o_c[None, :] * s[3]


@triton.jit
def start_tile(h, s_h, NH, h0, s_h0, N0, i_c, i_n, i_h, o_r, o_c, m):
    """The tile of the state that a span starts from: row i_c of h's NH, else row i_n of h0's N0, else zero."""
    if i_c >= 0:
        b = tl.load(state_tile(h, s_h, i_c, i_h, o_r, o_c), mask=m & (i_c < NH), other=0.0).to(tl.float32)
    else:
        b = tl.load(state_tile(h0, s_h0, i_n, i_h, o_r, o_c), mask=m & (i_n < N0), other=0.0).to(tl.float32)
    return b
