"""Tiles of a batch's tokens and of states, for the Triton kernels.

Kernels name what they hold as flash-linear-attention does: `i_*` an index, `o_*` offsets, `m_*` a mask, `p_*` pointers,
`b_*` a block of values; `s_*` are a tensor's strides, and capitals are extents. `spans` are `Spans.columns`.
"""

import triton
import triton.language as tl


@triton.jit
def token_tile(base, s, o_t, i_h, o_d):
    """Pointers to channels o_d of head i_h of tokens o_t."""
    return base + o_t[:, None] * s[0] + i_h * s[1] + o_d[None, :] * s[2]


@triton.jit
def state_tile(base, s, i_row, i_h, o_r, o_c):
    """Pointers to rows o_r and columns o_c of head i_h of state i_row."""
    return base + i_row * s[0] + i_h * s[1] + o_r[:, None] * s[2] + o_c[None, :] * s[3]


@triton.jit
def start_tile(h, s_h, h0, s_h0, i_c, i_n, i_h, o_r, o_c, m):
    """The tile of the state that a span starts from: of chunk i_c of h, else of sequence i_n of h0, else zero."""
    b = tl.zeros((o_r.shape[0], o_c.shape[0]), dtype=tl.float32)
    if i_c >= 0:
        if h is not None:
            b = tl.load(state_tile(h, s_h, i_c, i_h, o_r, o_c), mask=m, other=0.0).to(tl.float32)
    elif h0 is not None:
        b = tl.load(state_tile(h0, s_h0, i_n, i_h, o_r, o_c), mask=m, other=0.0).to(tl.float32)
    return b
