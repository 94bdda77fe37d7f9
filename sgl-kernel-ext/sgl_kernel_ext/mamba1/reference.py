"""The Mamba1 recurrence in torch: prefill, a scan that stops and stores on its way, and one decode step.

A channel keeps a vector h (state_dim). With the step size delta > 0 of the channel and its A < 0, one for each of the
state's dimensions, a token decays it, adds the channel's input x along B and reads it along C (Mamba, arXiv 2312.00752,
section 3.2):

    h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t        elementwise in A, h and B
    y_t = h_t . C_t + D x_t

As every dimension decays at its own rate, no product of matrices gives the state in the middle of a chunk: the scan
runs token by token here, for all channels and sequences at once. Whoever computes the outputs keeps no states on the
way (SGLang's `MambaMixer1` and the fused scan of mamba-ssm do not), so `checkpoint` scans again, without outputs, the
sequences of which states are kept, each up to the deepest of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext import varlen
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.state_pool import StateSlots, initial_states


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What a prefill computed.

    `outputs` (num_tokens, num_channels) has the dtype of x; `final_states` (num_sequences, num_channels, state_dim) has
    the dtype of the computation.
    """

    outputs: Tensor
    final_states: Tensor


def prefill(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    cu_seqlens: Tensor,
    D: Tensor | None = None,
    states: StateSlots | None = None,
) -> Prefill:
    """Run whole sequences, each from its slot of `states` and back into it, or from zero without `states`.

    x (num_tokens, num_channels); B and C (num_tokens, state_dim) of the dtype of x; delta (num_tokens, num_channels), A
    (num_channels, state_dim) and D (num_channels,) of any float dtype; cu_seqlens (num_sequences + 1,) integer; a slot
    holds (num_channels, state_dim). Computes in float32, in float64 for float64 inputs. Raises ValueError for other
    shapes and dtypes.
    """
    _require_inputs(x, delta, A, B, C, D)
    num_tokens, num_channels = x.shape
    varlen.require_cu_seqlens(cu_seqlens, num_tokens)
    dtype = torch.promote_types(x.dtype, torch.float32)
    state_shape = (num_channels, B.shape[1])
    carried = initial_states(states, cu_seqlens.shape[0] - 1, state_shape, dtype, x.device)
    rates, outputs = A.to(dtype), _skip(x, D, dtype)
    # With chunks of one token, a chunk is its token.
    for step in varlen.per_sequence(cu_seqlens, 1).steps:
        state = _after(carried[step.sequences], x, delta, rates, B, step.chunks)
        carried[step.sequences] = state
        outputs[step.chunks] += (state @ C[step.chunks].to(dtype)[..., None]).squeeze(-1)
    if states is not None:
        outputs[states.is_padding[varlen.sequence_of_token(cu_seqlens)]] = 0
        states.write(carried)
    return Prefill(outputs.to(x.dtype), carried)


def checkpoint(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, *, initial_states: Tensor | None, spans: Spans, pool: Tensor
) -> None:
    """Scan the sequences of `spans` and write the states at their ends to their slots of `pool`.

    x and delta (num_tokens, num_channels), A (num_channels, state_dim) and B (num_tokens, state_dim) as the recurrence
    sees them; initial_states (num_sequences, num_channels, state_dim), or None where all sequences start from zero; all
    of any float dtype. `spans` from the start of each sequence; pool (num_slots, num_channels, state_dim) of any float
    dtype and strides. `initial_states` may lie in the pool, but in none of the slots that are written. Computes in
    float32, in float64 for float64 inputs. Raises ValueError for other shapes and dtypes and for a slot outside the
    pool.
    """
    require_checkpoint(x, delta, A, B, initial_states, spans, pool)
    if not len(spans):
        return
    dtype = torch.promote_types(x.dtype, torch.float32)
    rates = A.to(dtype)
    owners = spans.sequences.tolist()
    distinct = sorted(set(owners))
    sequences = torch.tensor(distinct, device=pool.device)
    which = torch.tensor([distinct.index(owner) for owner in owners], device=pool.device)
    starts = torch.empty_like(sequences).index_copy(0, which, spans.starts)
    lengths = spans.ends - spans.starts
    deepest = torch.zeros_like(sequences).scatter_reduce(0, which, lengths, "amax")
    if initial_states is None:
        carried = torch.zeros(len(sequences), *pool.shape[1:], dtype=dtype, device=pool.device)
    else:
        carried = initial_states[sequences].to(dtype)
    done = 0
    for stop in sorted(set(lengths.tolist())):
        for offset in range(done, stop):
            going = (deepest > offset).nonzero()[:, 0]
            carried[going] = _after(carried[going], x, delta, rates, B, starts[going] + offset)
        done = stop
        stored = lengths == stop
        pool[spans.slots[stored]] = carried[which[stored]].to(pool.dtype)


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
    """One token of every sequence: update its slot in place and return (num_sequences, num_channels).

    Shapes, dtypes and errors are those of `prefill`, with one token a sequence.
    """
    _require_inputs(x, delta, A, B, C, D)
    num_sequences, num_channels = x.shape
    states.require(num_sequences, (num_channels, B.shape[1]))
    dtype = torch.promote_types(x.dtype, torch.float32)
    updated = _after(states.read(dtype), x, delta, A.to(dtype), B, torch.arange(num_sequences, device=x.device))
    states.write(updated)
    outputs = _skip(x, D, dtype) + (updated @ C.to(dtype)[..., None]).squeeze(-1)
    return outputs.masked_fill(states.is_padding[:, None], 0).to(x.dtype)


def _after(states: Tensor, x: Tensor, delta: Tensor, A: Tensor, B: Tensor, tokens: Tensor) -> Tensor:
    """`states` (n, num_channels, state_dim), each after the one token of `tokens` (n,)."""
    step_size = delta[tokens].to(states.dtype)[..., None]
    taken_in = step_size * x[tokens].to(states.dtype)[..., None] * B[tokens].to(states.dtype)[:, None]
    return (step_size * A).exp() * states + taken_in


def _skip(x: Tensor, D: Tensor | None, dtype: torch.dtype) -> Tensor:
    """D x, the part of the output that bypasses the state."""
    return torch.zeros(x.shape, dtype=dtype, device=x.device) if D is None else x.to(dtype) * D.to(dtype)


def require_checkpoint(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, initial_states: Tensor | None, spans: Spans, pool: Tensor
) -> None:
    """Raise ValueError for arguments that `checkpoint` does not take."""
    _require_x_and_inflow(x, B)
    state_shape = (x.shape[1], B.shape[1])
    _require_shape("delta", delta, tuple(x.shape))
    _require_shape("A", A, state_shape)
    if initial_states is not None:
        _require_shape("initial_states", initial_states, (*initial_states.shape[:1], *state_shape))
        spans.require_sequences(initial_states.shape[0], "initial_states")
    _require_shape("pool", pool, (*pool.shape[:1], *state_shape))
    spans.require_tokens(x.shape[0])
    spans.require_slots(pool)


def _require_inputs(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None) -> None:
    _require_x_and_inflow(x, B)
    if C.shape != B.shape:
        raise ValueError(f"C has shape {tuple(C.shape)}: expected that of B, {tuple(B.shape)}")
    if B.dtype != x.dtype or C.dtype != x.dtype:
        raise ValueError(f"x, B and C have dtypes {x.dtype}, {B.dtype} and {C.dtype}: expected one dtype")
    _require_shape("delta", delta, tuple(x.shape))
    _require_shape("A", A, (x.shape[1], B.shape[1]))
    if D is not None:
        _require_shape("D", D, (x.shape[1],))


def _require_x_and_inflow(x: Tensor, B: Tensor) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"x has shape {tuple(x.shape)} and dtype {x.dtype}: expected (num_tokens, num_channels) of a float dtype"
        )
    if B.dim() != 2 or B.shape[0] != x.shape[0] or not B.is_floating_point():
        raise ValueError(
            f"B has shape {tuple(B.shape)} and dtype {B.dtype}: "
            f"expected (num_tokens, state_dim) of a float dtype with {x.shape[0]} tokens"
        )


def _require_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_floating_point():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: expected {shape} of a float dtype"
        )
