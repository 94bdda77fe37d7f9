"""Which requests end in a step over drafts, and where the state at each end goes, in torch.

A step runs a model over `num_nodes` drafted tokens of each request, and accepts n_0 .. n_k of them:

    accepted nodes    n_0 .. n_k, counted over the batch; n_0 is the token that was sampled last
    tokens out        o_0 .. o_k, each what the model says after its node
    lengths           the state of n_i stands after num_before + 1 + i tokens, and o_i is token num_before + 2 + i

A request ends with its first o_i that is a stop token or makes it as long as it may be. The state at that end is that
of n_{i+1}, or of n_k where o_i is the last. Where only the host can tell, and nothing else has ended the request, it is
that of n_0. It goes to that of the request's two tracking slots whose turn it is.
"""

import torch
from torch import Tensor

from sgl_kernel_ext.arguments import INTEGERS, require

_NONE = -1
_ALIGNMENT = 4
"""Values of 16 bytes: Triton compiles what reads a vector anew for one that does not start at a multiple of them."""


def new(num_requests: int, device: torch.device | str) -> Tensor:
    """Make room for what `find` writes: (3, num_requests) int32, each row aligned."""
    num_padded = -(-num_requests // _ALIGNMENT) * _ALIGNMENT
    return torch.empty(3, num_padded, dtype=torch.int32, device=device)[:, :num_requests]


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
    """Write what becomes of each request to `out` (3, batch) int32.

    Its rows are:

        nodes    the node of its request whose state is copied, or -1,
        slots    where it goes, 0 where nothing is copied: what translates slots reads every one,
        depths   after how many tokens that state stands, or -1.

    tokens_out (batch * num_nodes,) are what the model says after each node; accepted (batch, max_depth) the accepted
    nodes, num_accepted (batch,) how many they are, and num_before (batch,) the tokens that each request had a state of
    when the step began. stop_tokens (batch, num_stops) end it, -1 for none; max_lengths (batch,) are tokens of prompt
    and answer; by_host (batch,) bool says who may end by what only the host knows. tracking_slots (num_requests, 2) are
    those of request requests[i]; turns (batch,) says which is written, -1 for none, and a negative slot is none either.
    All others are int32 or int64. Raises ValueError for other shapes and dtypes.
    """
    require_find(
        out, tokens_out, accepted, num_accepted, num_before, num_nodes, stop_tokens, max_lengths, by_host,
        tracking_slots, requests, turns,
    )  # fmt: skip
    batch, depth = accepted.shape
    index = torch.arange(depth, device=out.device)
    said = tokens_out[accepted.clamp(min=0).long()]
    last = num_accepted.long()[:, None] - 1
    is_stop = (said[..., None] == stop_tokens[:, None]).any(-1)
    is_stop |= num_before[:, None] + 2 + index == max_lengths[:, None]
    first = torch.where(is_stop & (index <= last), index, depth).amin(-1, keepdim=True)
    ends = torch.where(first <= last, torch.minimum(first + 1, last), _NONE)[:, 0]
    ends = torch.where((ends < 0) & by_host, 0, ends)

    rows = torch.arange(batch, device=out.device)
    nodes = accepted[rows, ends.clamp(min=0)] - rows * num_nodes
    slots = torch.where(turns >= 0, tracking_slots[requests.long(), turns.clamp(min=0).long()], _NONE)
    is_copied = (ends >= 0) & (nodes >= 0) & (slots >= 0)
    out[0] = torch.where(is_copied, nodes, _NONE)
    out[1] = torch.where(is_copied, slots, 0)
    out[2] = torch.where(is_copied, num_before + 1 + ends, _NONE)


def require_find(
    out: Tensor,
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
    """Raise ValueError for arguments that `find` does not take."""
    batch = accepted.shape[0]
    require("out", out, (3, batch), dtypes=(torch.int32,))
    require("tokens_out", tokens_out, (batch * num_nodes,), dtypes=INTEGERS)
    require("accepted", accepted, (batch, "max_depth"), dtypes=INTEGERS)
    require("stop_tokens", stop_tokens, (batch, "num_stops"), dtypes=INTEGERS)
    require("tracking_slots", tracking_slots, ("num_requests", 2), dtypes=INTEGERS)
    require("by_host", by_host, (batch,), dtypes=(torch.bool,))
    for name, vector in (
        ("num_accepted", num_accepted),
        ("num_before", num_before),
        ("max_lengths", max_lengths),
        ("requests", requests),
        ("turns", turns),
    ):
        require(name, vector, (batch,), dtypes=INTEGERS)
