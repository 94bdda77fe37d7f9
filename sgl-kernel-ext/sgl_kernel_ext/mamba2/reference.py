"""The Mamba2 recurrence in torch: prefill over chunks, and one decode step.

A head keeps a matrix h (head_dim, state_dim). With the step size delta > 0 and the head's A < 0 a token decays it,
adds its input x along B and reads it along C (Mamba-2, arXiv 2405.21060, section 6):

    h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t^T
    y_t = h_t C_t + D x_t

Within a chunk with start state h_0 and G_t = A (delta_1 + ... + delta_t) this is

    h_t = exp(G_t) h_0 + sum_{s <= t} exp(G_t - G_s) delta_s x_s B_s^T

which also gives the state at any token from the chunk's start state and the inputs. Chunks lie on one grid over the
batch, cut in addition where a sequence starts (`varlen.over_batch`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext import varlen
from sgl_kernel_ext.state_pool import StateSlots, initial_states


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What a prefill computed.

    `outputs` (num_tokens, num_heads, head_dim) has the dtype of x; states have the dtype of the computation.
    `chunk_states` (num_chunks, num_heads, head_dim, state_dim) is the state before each chunk and `chunk_starts`
    (num_chunks,) int64 the token at which it starts in the batch; the multiples of chunk_size among them are the grid.
    `final_states` (num_sequences, num_heads, head_dim, state_dim).
    """

    outputs: Tensor
    chunk_states: Tensor
    chunk_starts: Tensor
    final_states: Tensor


def prefill(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    cu_seqlens: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    states: StateSlots | None = None,
) -> Prefill:
    """Run whole sequences, each from its slot of `states` and back into it, or from zero without `states`.

    x (num_tokens, num_heads, head_dim); B and C (num_tokens, num_groups, state_dim) of the dtype of x, where
    num_groups divides num_heads and head h uses group h // (num_heads / num_groups); delta (num_tokens, num_heads),
    A (num_heads,) and D (num_heads,) or (num_heads, head_dim) of any float dtype; cu_seqlens (num_sequences + 1,)
    integer; a slot holds (num_heads, head_dim, state_dim). Computes in float32, in float64 for float64 inputs. Raises
    ValueError for other shapes and dtypes.
    """
    _require_inputs(x, delta, A, B, C, D)
    num_tokens, num_heads, head_dim = x.shape
    state_dim = B.shape[-1]
    varlen.require_cu_seqlens(cu_seqlens, num_tokens)
    num_sequences = cu_seqlens.shape[0] - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    carried = initial_states(states, num_sequences, (num_heads, head_dim, state_dim), dtype, x.device)
    chunks = varlen.over_batch(cu_seqlens, chunk_size)

    group = num_heads // B.shape[1]
    inflow, outflow = (chunks.gather(m.to(dtype)).transpose(1, 2).repeat_interleave(group, 1) for m in (B, C))
    weighted = chunks.gather(x.to(dtype) * delta.to(dtype)[..., None]).transpose(1, 2)
    total = chunks.gather(delta.to(dtype) * A.to(dtype)).transpose(1, 2).cumsum(-1)
    to_end = (total[..., -1:] - total).exp()[..., None]
    increments = (to_end * weighted).mT @ inflow
    decay = total[..., -1].exp()[..., None, None]

    carried = (
        x.new_zeros(num_sequences, num_heads, head_dim, state_dim, dtype=dtype)
        if states is None
        else states.read(dtype)
    )
    chunk_states = torch.empty_like(increments)
    for step in chunks.steps:
        start = carried[step.sequences]
        chunk_states[step.chunks] = start
        carried[step.sequences] = decay[step.chunks] * start + increments[step.chunks]

    causal = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).tril()
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    relative = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    outputs = ((outflow @ inflow.mT) * relative) @ weighted + total.exp()[..., None] * (outflow @ chunk_states.mT)

    flat = chunks.scatter(outputs.transpose(1, 2), num_tokens) + _skip(x, D, dtype)
    if states is not None:
        flat[states.is_padding[varlen.sequence_of_token(cu_seqlens)]] = 0
        states.write(carried)
    return Prefill(flat.to(x.dtype), chunk_states, chunks.starts, carried)


def decode(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    states: StateSlots,
    D: Tensor | None = None,
) -> Tensor:
    """One token of every sequence: update its slot in place and return (num_sequences, num_heads, head_dim).

    Shapes, dtypes and errors are those of `prefill`, with one token a sequence.
    """
    _require_inputs(x, delta, A, B, C, D)
    num_sequences, num_heads, head_dim = x.shape
    states.require(num_sequences, (num_heads, head_dim, B.shape[-1]))
    dtype = torch.promote_types(x.dtype, torch.float32)
    group = num_heads // B.shape[1]
    inflow, outflow = (m.to(dtype).repeat_interleave(group, 1) for m in (B, C))
    step_size = delta.to(dtype)
    decay = (step_size * A.to(dtype)).exp()[..., None, None]
    weighted = x.to(dtype) * step_size[..., None]
    updated = decay * states.read(dtype) + weighted[..., None] * inflow[..., None, :]
    states.write(updated)
    outputs = (updated @ outflow[..., None]).squeeze(-1) + _skip(x, D, dtype)
    return outputs.masked_fill(states.is_padding[:, None, None], 0).to(x.dtype)


def _skip(x: Tensor, D: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D x, the part of the output that bypasses the state."""
    if D is None:
        return torch.zeros((), dtype=dtype, device=x.device)
    return x.to(dtype) * D.to(dtype).reshape(x.shape[1], -1)


def _require_inputs(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(
            f"x has shape {tuple(x.shape)} and dtype {x.dtype}: "
            "expected (num_tokens, num_heads, head_dim) of a float dtype"
        )
    num_heads = x.shape[1]
    if B.dim() != 3 or B.shape[0] != x.shape[0] or B.shape[1] == 0 or num_heads % B.shape[1]:
        raise ValueError(
            f"B has shape {tuple(B.shape)}: expected (num_tokens, num_groups, state_dim) "
            f"with {x.shape[0]} tokens and a divisor of {num_heads} heads"
        )
    if C.shape != B.shape:
        raise ValueError(f"C has shape {tuple(C.shape)}: expected that of B, {tuple(B.shape)}")
    if B.dtype != x.dtype or C.dtype != x.dtype:
        raise ValueError(f"x, B and C have dtypes {x.dtype}, {B.dtype} and {C.dtype}: expected one dtype")
    _require_shape("delta", delta, (x.shape[0], num_heads))
    _require_shape("A", A, (num_heads,))
    if D is not None:
        _require_shape("D", D, (num_heads,), (num_heads, x.shape[2]))


def _require_shape(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    if tuple(tensor.shape) not in shapes or not tensor.is_floating_point():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: "
            f"expected {' or '.join(str(shape) for shape in shapes)} of a float dtype"
        )
