"""The states at the ends of requests in a step over drafts, found in one launch.

A program is a request: it reads its accepted nodes and what the model says after each, holds those against its stop
tokens one after the other, and writes three numbers. All vectors are short, so it is one warp, and its time is that of
the launch. Of a step's sizes only the block that covers the accepted nodes is compiled, 16 of them at least.
"""

import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.draft_ends.reference import require_find
from sgl_kernel_ext.launch import block, on_device_of


def find(
    out: Tensor,
    *,
    tokens_out: Tensor,
    accepted: Tensor,
    num_accepted: Tensor,
    num_before: Tensor,
    num_nodes: int,
    stop_tokens: Tensor,
    max_lengths: Tensor,
    by_host: Tensor,
    tracking_slots: Tensor,
    requests: Tensor,
    turns: Tensor,
) -> None:
    """Run `reference.find` on an accelerator.

    Raises ValueError where a tensor has fewer rows than the batch; other shapes, and that all but `out` are contiguous,
    are the caller's word.
    """
    batch, depth = accepted.shape
    if not batch:
        return
    per_request = (num_accepted, num_before, stop_tokens, max_lengths, by_host, requests, turns)
    if (
        out.size(1) < batch
        or tokens_out.size(0) < batch * num_nodes
        or min(each.size(0) for each in per_request) < batch
    ):
        require_find(
            out, tokens_out, accepted, num_accepted, num_before, num_nodes, stop_tokens, max_lengths, by_host,
            tracking_slots, requests, turns,
        )  # fmt: skip
    with on_device_of(out):
        _find_kernel[(batch,)](
            out,
            tokens_out,
            accepted,
            num_accepted,
            num_before,
            stop_tokens,
            max_lengths,
            by_host,
            tracking_slots,
            requests,
            turns,
            out.stride(0),
            accepted.stride(0),
            stop_tokens.stride(0),
            tracking_slots.stride(0),
            num_nodes,
            depth,
            stop_tokens.size(1),
            BD=block(depth, None),
            num_warps=1,
        )


@triton.jit(
    do_not_specialize=("s_out", "s_accepted", "s_stops", "s_tracking", "N", "D", "W"),
    do_not_specialize_on_alignment=(
        "out",
        "tokens_out",
        "accepted",
        "num_accepted",
        "num_before",
        "stop_tokens",
        "max_lengths",
        "by_host",
        "tracking_slots",
        "requests",
        "turns",
    ),
)
def _find_kernel(
    out,
    tokens_out,
    accepted,
    num_accepted,
    num_before,
    stop_tokens,
    max_lengths,
    by_host,
    tracking_slots,
    requests,
    turns,
    s_out,
    s_accepted,
    s_stops,
    s_tracking,
    N,
    D,
    W,
    BD: tl.constexpr,
):
    """Write what becomes of one request.

    extents  N nodes a request, D accepted at most, covered by BD, W stop tokens
    strides  of the rows of each
    indices  i_b request, i_w stop token, i_end the accepted node whose state is left; o_d accepted nodes
    blocks   b_said what the model says after each, m_stop those that end the request
    """
    i_b = tl.program_id(0)
    num = tl.load(num_accepted + i_b).to(tl.int32)
    before = tl.load(num_before + i_b)
    o_d = tl.arange(0, BD)
    m_d = (o_d < num) & (o_d < D)
    p_accepted = accepted + i_b * s_accepted
    b_said = tl.load(tokens_out + tl.load(p_accepted + o_d, mask=m_d, other=0), mask=m_d, other=-1)
    m_stop = before + 2 + o_d == tl.load(max_lengths + i_b)
    for i_w in range(W):
        m_stop = m_stop | (b_said == tl.load(stop_tokens + i_b * s_stops + i_w))
    first = tl.min(tl.where(m_stop & m_d, o_d, BD), 0)

    i_host = tl.where(tl.load(by_host + i_b) != 0, 0, -1)
    i_end = tl.where(first < BD, tl.minimum(first + 1, num - 1), i_host)
    node = tl.load(p_accepted + tl.maximum(i_end, 0)).to(tl.int32) - i_b * N
    turn = tl.load(turns + i_b)
    slot = tl.load(tracking_slots + tl.load(requests + i_b) * s_tracking + tl.maximum(turn, 0)).to(tl.int32)
    is_copied = (i_end >= 0) & (node >= 0) & (turn >= 0) & (slot >= 0)
    p_out = out + i_b
    tl.store(p_out, tl.where(is_copied, node, -1))
    tl.store(p_out + s_out, tl.where(is_copied, slot, 0))
    tl.store(p_out + 2 * s_out, tl.where(is_copied, (before + 1 + i_end).to(tl.int32), -1))
