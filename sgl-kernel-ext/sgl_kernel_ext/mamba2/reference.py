"""The Mamba2 recurrence in torch: prefill over chunks, and one decode step.

A head keeps a matrix h (head_dim, state_dim). With the step size delta > 0 and the head's A < 0 a token decays it,
adds its input x along B and reads it along C (Mamba-2, arXiv 2405.21060, section 6):

    h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t^T
    y_t = h_t C_t + D x_t

Within a chunk with start state h_0 and G_t = A (delta_1 + ... + delta_t) this is

    h_t = exp(G_t) h_0 + sum_{s <= t} exp(G_t - G_s) delta_s x_s B_s^T

which also gives the state at any token from the chunk's start state and the inputs; `checkpoint` evaluates it. Chunks
lie on one grid over the batch, cut in addition where a sequence starts (`varlen.over_batch`). `delta` and G are also
kept on the grid itself, as SGLang's scan leaves them: there G starts anew with every chunk of the grid and not with a
sequence, so that decays of a sequence that begins inside a chunk are differences of G.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext import varlen
from sgl_kernel_ext.arguments import require, require_one_dtype, require_shared
from sgl_kernel_ext.checkpoints import NO_CHUNK, Spans
from sgl_kernel_ext.state_pool import StateSlots, initial_states


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """The results of a prefill.

    `outputs` (num_tokens, num_heads, head_dim) has the dtype of x; states have the dtype of the computation.
    `chunk_states` (num_chunks, num_heads, head_dim, state_dim) is the state before each chunk and `chunk_starts`
    (num_chunks,) int64 the token at which it starts in the batch; the multiples of chunk_size among them are the grid.
    `final_states` (num_sequences, num_heads, head_dim, state_dim). `delta` and `decay_sums` (num_heads,
    num_grid_chunks, chunk_size) are the step sizes and G on the grid, where G starts anew with every chunk of the grid;
    behind the last token delta is zero.
    """

    outputs: Tensor
    chunk_states: Tensor
    chunk_starts: Tensor
    final_states: Tensor
    delta: Tensor
    decay_sums: Tensor

    @property
    def grid_states(self) -> Tensor:
        """(num_grid_chunks, num_heads, head_dim, state_dim): row c is the state before token c * chunk_size."""
        return self.chunk_states[self.chunk_starts % self.decay_sums.shape[-1] == 0]


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
    on_grid = _on_grid(delta.to(dtype), chunk_size)
    decay_sums = (on_grid * A.to(dtype)[:, None, None]).cumsum(-1)
    return Prefill(flat.to(x.dtype), chunk_states, chunks.starts, carried, on_grid, decay_sums)


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
    """Write the states at the ends of `spans` to their slots of `pool`, from what a prefill left.

    x (num_tokens, num_heads, head_dim) and B (num_tokens, num_groups, state_dim) as the recurrence sees them; delta and
    decay_sums (num_heads, num_grid_chunks, chunk_size), where the sum of A delta starts anew with every chunk of the
    grid; chunk_states (num_grid_chunks, num_heads, head_dim, state_dim), the rows of the grid (`Prefill.grid_states`);
    initial_states (num_sequences, num_heads, head_dim, state_dim), or None where all sequences start from zero; all of
    any float dtype. `spans` on the grid over the batch, of this chunk_size; pool (num_slots, num_heads, head_dim,
    state_dim) of any float dtype and strides. Computes in float32, in float64 for float64 inputs. Raises ValueError for
    other shapes and dtypes, for spans of another grid, and for a slot outside the pool.
    """
    require_checkpoint(x, delta, decay_sums, B, chunk_states, initial_states, chunk_size, spans, pool)
    dtype = torch.promote_types(x.dtype, torch.float32)
    # (num_grid_chunks * chunk_size, num_heads): the grid as the tokens that lie on it.
    step_sizes, sums = (grid.flatten(1).T for grid in (delta, decay_sums))
    for sequence, chunk, start, end, slot in spans.rows():
        held, row = (initial_states, sequence) if chunk == NO_CHUNK else (chunk_states, chunk)
        state = x.new_zeros((), dtype=dtype) if held is None else held[row].to(dtype)
        if start < end:
            at_end, own = sums[end - 1].to(dtype), slice(start, end)
            weight = (at_end - sums[own].to(dtype)).exp() * step_sizes[own].to(dtype)
            inputs, inflow = weight[..., None] * x[own].to(dtype), B[own].to(dtype)
            # Heads that share a group lie side by side.
            written = inputs.reshape(end - start, B.shape[1], -1).permute(1, 2, 0) @ inflow.transpose(0, 1)
            passed = at_end - sums[start - 1].to(dtype) if start % chunk_size else at_end
            state = passed.exp()[:, None, None] * state + written.view(pool.shape[1:])
        pool[slot] = state


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
    """Run one token of every sequence: update its slot in place, return (num_sequences, num_heads, head_dim).

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


def _on_grid(values: Tensor, chunk_size: int) -> Tensor:
    """(num_tokens, num_heads) as (num_heads, num_grid_chunks, chunk_size), zero behind the last token."""
    num_tokens, num_heads = values.shape
    padded = values.new_zeros(-(-num_tokens // chunk_size) * chunk_size, num_heads)
    padded[:num_tokens] = values
    return padded.T.reshape(num_heads, -1, chunk_size)


def require_checkpoint(
    x: Tensor,
    delta: Tensor,
    decay_sums: Tensor,
    B: Tensor,
    chunk_states: Tensor,
    initial_states: Tensor | None,
    chunk_size: int,
    spans: Spans,
    pool: Tensor,
) -> None:
    """Raise ValueError for arguments that `checkpoint` does not take."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    _require_x_and_inflow(x, B)
    num_tokens, num_heads, head_dim = x.shape
    state_shape = (num_heads, head_dim, B.shape[-1])
    num_chunks = -(-num_tokens // chunk_size)
    require("delta", delta, (num_heads, num_chunks, chunk_size))
    require("decay_sums", decay_sums, (num_heads, num_chunks, chunk_size))
    require("chunk_states", chunk_states, (num_chunks, *state_shape))
    if initial_states is not None:
        require("initial_states", initial_states, ("num_sequences", *state_shape))
        spans.require_sequences("initial_states", initial_states.shape[0])
    require("pool", pool, ("num_slots", *state_shape))
    if spans.max_tokens > chunk_size:
        raise ValueError(
            f"a span must have at most {chunk_size} tokens, the chunk_size, got {spans.max_tokens}: "
            "were the spans made on another grid?"
        )
    spans.require_batch(num_tokens, pool)


def _require_x_and_inflow(x: Tensor, B: Tensor) -> None:
    require("x", x, ("num_tokens", "num_heads", "head_dim"))
    require("B", B, (x.shape[0], "num_groups", "state_dim"))
    require_shared("B", B, x.shape[1])


def _require_inputs(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    _require_x_and_inflow(x, B)
    require("C", C, B.shape)
    require_one_dtype(x=x, B=B, C=C)
    require("delta", delta, x.shape[:2])
    require("A", A, x.shape[1:2])
    if D is not None:
        require("D", D, x.shape[1:2], x.shape[1:])
