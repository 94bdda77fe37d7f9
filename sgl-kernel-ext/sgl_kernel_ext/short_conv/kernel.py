"""Windows of a short convolution that end at any token, in one launch.

A program writes a block of channels of one window, place by place: an input of the sequence or, before its first, what
the window that it continues from holds. A window is width - 1 inputs, so what is read and written is a few bytes a
channel; a block lies along the channels, which are side by side in the inputs. Values are only copied: they have the
bits of their source where the dtypes are one.
"""

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.launch import Launcher
from sgl_kernel_ext.short_conv.reference import require_checkpoint
from sgl_kernel_ext.state_pool import StateSlots
from sgl_kernel_ext.tile import SPANS

_BLOCK_CHANNELS = 256


def checkpoint(x: Tensor, *, states: StateSlots | None, spans: Spans, pool: Tensor) -> None:
    """Run `reference.checkpoint` on an accelerator.

    Raises ValueError for too few tokens or sequences; other shapes are the caller's word. Nothing is written for a slot
    outside the pool.
    """
    if states is None:
        windows = slots = has = None
    else:
        windows, slots, has = states.pool, states.slots, states.has_initial_state
    if _launch_checkpoint.repeat(spans, x, windows, slots, has, pool):
        return
    num_spans = len(spans)
    if not num_spans:
        return
    num_sequences = min((each.size(0) for each in (slots, has) if each is not None), default=spans.num_sequences)
    if x.size(0) < spans.num_tokens or num_sequences < spans.num_sequences:
        require_checkpoint(x, states, spans, pool)
    num_slots, num_channels, num_kept = pool.shape
    _launch_checkpoint(
        spans,
        (num_spans, -(-num_channels // _BLOCK_CHANNELS)),
        (x, windows, slots, has, pool),
        spans.columns,
        (
            x.stride(),
            None if windows is None else windows.stride(),
            None if slots is None else slots.stride(0),
            None if has is None else has.stride(0),
            pool.stride(),
            None if windows is None else windows.size(0),
            num_slots,
            num_channels,
        ),
        W=num_kept,
        BC=_BLOCK_CHANNELS,
    )


@triton.jit(do_not_specialize=("s_slots0", "s_has0", "N0"), do_not_specialize_on_alignment=(*SPANS, "slots0", "has0"))
def _checkpoint_kernel(
    x,
    w0,
    slots0,
    has0,
    pool,
    sequences,
    chunks,
    starts,
    ends,
    slots,
    s_x,
    s_w0,
    s_slots0,
    s_has0,
    s_pool,
    N0,
    N,
    C,
    W: tl.constexpr,
    BC: tl.constexpr,
):
    """Write BC channels of a window.

    tensors  x inputs, w0 the windows that sequences continue from, their slots0, and has0, whether they do
    extents  N slots, N0 slots of w0, C channels, W inputs a window
    indices  i_n checkpoint, i_q sequence, i_s and i_s0 slots, i_w place in the window, i_t its token; o_c channels
    """
    i_n = tl.program_id(0)
    i_s = tl.load(slots + i_n)
    if (i_s < 0) | (i_s >= N):
        return
    start, end = tl.load(starts + i_n), tl.load(ends + i_n)
    o_c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    m_c = o_c < C

    if w0 is not None:
        i_q = tl.load(sequences + i_n)
        i_s0 = tl.load(slots0 + i_q * s_slots0).to(tl.int64)
        continues = (i_s0 >= 0) & (i_s0 < N0)
        if has0 is not None:
            continues = continues & (tl.load(has0 + i_q * s_has0) != 0)

    for i_w in tl.static_range(W):
        i_t = end - W + i_w
        is_input = i_t >= start
        b_w = tl.load(x + i_t * s_x[0] + o_c * s_x[1], mask=m_c & is_input, other=0.0).to(pool.dtype.element_ty)
        if w0 is not None:
            # As many inputs as the sequence has given have pushed out as many of its window.
            p_w0 = w0 + i_s0 * s_w0[0] + o_c * s_w0[1] + (i_w + end - start) * s_w0[2]
            b_w0 = tl.load(p_w0, mask=m_c & (continues & (i_t < start)), other=0.0).to(pool.dtype.element_ty)
            b_w = tl.where(is_input, b_w, b_w0)
        tl.store(pool + i_s * s_pool[0] + o_c * s_pool[1] + i_w * s_pool[2], b_w, mask=m_c)


_launch_checkpoint = Launcher(_checkpoint_kernel)
