"""The gated delta rule in torch: prefill over chunks, and one decode step.

A head keeps a matrix S (value_dim, key_dim). A token decays it by exp(g), replaces the value it holds for the key k
by a share beta of the new value v, and reads it with the query q:

    u_t = beta_t (v_t - exp(g_t) S_{t-1} k_t)        the corrected value
    S_t = exp(g_t) S_{t-1} + u_t k_t^T
    o_t = scale S_t q_t

Within a chunk with start state S_0 and G_t = g_1 + ... + g_t the corrected values solve a unit lower triangular
system, once for all tokens and heads (Gated Delta Networks, arXiv 2412.06464, section 3.3):

    (I + L) u = beta v - beta exp(G) k S_0^T         L_ts = beta_t exp(G_t - G_s) k_t . k_s  for s < t
    S_t = exp(G_t) S_0 + sum_{s <= t} exp(G_t - G_s) u_s k_s^T

The last line gives the state at any token from the chunk's start state and the corrected values: `Prefill` returns
both, with G, and `checkpoint` evaluates it. `advance` needs no corrected values, and finds them anew for the tokens in
between. Keys are expected to have unit length; the system stays well conditioned
for them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext import varlen
from sgl_kernel_ext.checkpoints import NO_CHUNK, Spans
from sgl_kernel_ext.state_pool import StateSlots, initial_states
from sgl_kernel_ext.varlen import Chunks

CHUNK_SIZE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What a prefill computed.

    `outputs` (num_tokens, num_value_heads, value_dim) has the dtype of v; the rest has the dtype of the computation.
    `chunk_states` (num_chunks, num_value_heads, value_dim, key_dim) is the state before each chunk, chunks counted
    from the start of each sequence and sequences in order; `corrected_values` (num_tokens, num_value_heads, value_dim)
    is u and `decay_sums` (num_tokens, num_value_heads) is G; `final_states` (num_sequences, num_value_heads, value_dim,
    key_dim).
    """

    outputs: Tensor
    chunk_states: Tensor
    corrected_values: Tensor
    decay_sums: Tensor
    final_states: Tensor


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    states: StateSlots | None = None,
    scale: float | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Prefill:
    """Run whole sequences, each from its slot of `states` and back into it, or from zero without `states`.

    q and k (num_tokens, num_key_heads, key_dim), v (num_tokens, num_value_heads, value_dim) of one float dtype, where
    num_key_heads divides num_value_heads and value head h uses key head h // (num_value_heads / num_key_heads); g (log
    of the decay) and beta (num_tokens, num_value_heads) of any float dtype; cu_seqlens (num_sequences + 1,) integer;
    a slot holds (num_value_heads, value_dim, key_dim). `scale` is key_dim ** -0.5 unless given. Computes in float32,
    in float64 for float64 inputs. Raises ValueError for other shapes and dtypes.
    """
    _require_inputs(q, k, v, g, beta)
    num_tokens, num_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    varlen.require_cu_seqlens(cu_seqlens, num_tokens)
    num_sequences = cu_seqlens.shape[0] - 1
    dtype = torch.promote_types(v.dtype, torch.float32)
    carried = initial_states(states, num_sequences, (num_heads, value_dim, key_dim), dtype, v.device)
    chunks = varlen.per_sequence(cu_seqlens, chunk_size)
    terms = _chunk_terms(q, k, v, g, beta, key_dim**-0.5 if scale is None else scale, chunks)

    chunk_states = carried.new_empty(chunks.starts.shape[0], num_heads, value_dim, key_dim)
    corrected = torch.empty_like(terms.value)
    for step in chunks.steps:
        start = carried[step.sequences]
        chunk_states[step.chunks] = start
        u = terms.value[step.chunks] - terms.key[step.chunks] @ start.mT
        corrected[step.chunks] = u
        decay = terms.decay[step.chunks][..., None, None]
        carried[step.sequences] = decay * start + u.mT @ terms.key_to_end[step.chunks]
    outputs = terms.query @ chunk_states.mT + terms.attention @ corrected

    flat = chunks.scatter(outputs.transpose(1, 2), num_tokens).to(v.dtype)
    if states is not None:
        flat[states.is_padding[varlen.sequence_of_token(cu_seqlens)]] = 0
        states.write(carried)
    corrected_values = chunks.scatter(corrected.transpose(1, 2), num_tokens)
    decay_sums = chunks.scatter(chunks.gather(g.to(dtype)).cumsum(1), num_tokens)
    return Prefill(flat, chunk_states, corrected_values, decay_sums, carried)


def checkpoint(
    k: Tensor, corrected_values: Tensor, decay_sums: Tensor, chunk_states: Tensor, *, spans: Spans, pool: Tensor
) -> None:
    """Write the states at the ends of `spans` to their slots of `pool`, from what a prefill left.

    k (num_tokens, num_key_heads, key_dim), as the recurrence sees it; corrected_values (num_tokens, num_value_heads,
    value_dim), decay_sums (num_tokens, num_value_heads) and chunk_states (num_chunks, num_value_heads, value_dim,
    key_dim) of any float dtype; `spans` on the grid of each sequence, of the prefill's chunk size; pool (num_slots,
    num_value_heads, value_dim, key_dim) of any float dtype and strides. Computes in float32, in float64 for float64
    inputs. Raises ValueError for other shapes and dtypes and for a slot outside the pool.
    """
    require_checkpoint(k, corrected_values, decay_sums, chunk_states, spans, pool)
    if not len(spans):
        return
    dtype = torch.promote_types(corrected_values.dtype, torch.float32)
    tokens, is_token = spans.tokens()
    group = corrected_values.shape[1] // k.shape[1]

    def taken(values: Tensor) -> Tensor:
        values = values[tokens].to(dtype)
        return torch.where(is_token.view(*is_token.shape, *(1,) * (values.dim() - 2)), values, 0)

    total = taken(decay_sums)
    # G rises in no step, and stands still behind the span.
    at_end = torch.where((spans.ends > spans.starts)[:, None], decay_sums[(spans.ends - 1).clamp(0)].to(dtype), 0)
    weight = (at_end[:, None] - total).masked_fill(~is_token[..., None], -torch.inf).exp()
    written = torch.einsum(
        "cthv,cthk->chvk", weight[..., None] * taken(corrected_values), taken(k).repeat_interleave(group, 2)
    )
    states = at_end.exp()[..., None, None] * chunk_states[spans.chunks].to(dtype) + written
    pool[spans.slots] = states.to(pool.dtype)


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
    """Write the states at the ends of `spans` to their slots of `pool`, by the recurrence over their tokens.

    For a prefill that leaves states of chunks and no corrected values. k (num_tokens, num_key_heads, key_dim), as the
    recurrence sees it, v (num_tokens, num_value_heads, value_dim), g and beta (num_tokens, num_value_heads), as
    `prefill` takes them; chunk_states (num_chunks, num_value_heads, value_dim, key_dim), or absent where no span starts
    from a chunk; initial_states (num_sequences, num_value_heads, value_dim, key_dim), zero if absent, of which only
    spans without a chunk are read; pool (num_slots, num_value_heads, value_dim, key_dim); all of any float dtype, the
    pool of any strides. Computes in float32, in float64 for float64 inputs. Raises ValueError for other shapes and
    dtypes, for chunks or initial states that spans need and are not there, and for a slot outside the pool.
    """
    require_advance(k, v, g, beta, chunk_states, initial_states, spans, pool)
    if not len(spans):
        return
    dtype = torch.promote_types(v.dtype, torch.float32)
    from_chunk = spans.chunks != NO_CHUNK
    start = torch.zeros(len(spans), *pool.shape[1:], dtype=dtype, device=pool.device)
    if chunk_states is not None:
        start[from_chunk] = chunk_states[spans.chunks[from_chunk]].to(dtype)
    if initial_states is not None:
        start[~from_chunk] = initial_states[spans.sequences[~from_chunk]].to(dtype)
    tokens, is_token = spans.tokens()
    own = tokens[is_token]
    keys, values = k[own].to(dtype), v[own].to(dtype)
    bounds = torch.nn.functional.pad((spans.ends - spans.starts).cumsum(0), (1, 0))
    states = StateSlots(start, torch.arange(len(spans), device=pool.device))
    made = prefill(keys, keys, values, g[own], beta[own], cu_seqlens=bounds, states=states)
    pool[spans.slots] = made.final_states.to(pool.dtype)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    states: StateSlots,
    scale: float | None = None,
) -> Tensor:
    """One token of every sequence: update its slot in place and return (num_sequences, num_value_heads, value_dim).

    Shapes, dtypes and errors are those of `prefill`, with one token a sequence.
    """
    _require_inputs(q, k, v, g, beta)
    num_sequences, num_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    states.require(num_sequences, (num_heads, value_dim, key_dim))
    dtype = torch.promote_types(v.dtype, torch.float32)
    group = num_heads // k.shape[1]
    query = q.to(dtype).repeat_interleave(group, 1) * (key_dim**-0.5 if scale is None else scale)
    key = k.to(dtype).repeat_interleave(group, 1)
    decayed = states.read(dtype) * g.to(dtype).exp()[..., None, None]
    held = (decayed @ key[..., None]).squeeze(-1)
    u = beta.to(dtype)[..., None] * (v.to(dtype) - held)
    updated = decayed + u[..., None] * key[..., None, :]
    states.write(updated)
    outputs = (updated @ query[..., None]).squeeze(-1)
    return outputs.masked_fill(states.is_padding[:, None, None], 0).to(v.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkTerms:
    """What a chunk needs apart from its start state; (num_chunks, num_value_heads, num_places, ...) unless said.

    With T = (I + L)^-1: `value` T beta v, `key` T beta exp(G) k, `query` scale exp(G) q, `attention` the masked
    scale exp(G_t - G_s) q_t . k_s, `key_to_end` exp(G_end - G) k and `decay` (num_chunks, num_value_heads) exp(G_end).
    """

    value: Tensor
    key: Tensor
    query: Tensor
    attention: Tensor
    key_to_end: Tensor
    decay: Tensor


def _chunk_terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, chunks: Chunks) -> _ChunkTerms:
    dtype = torch.promote_types(v.dtype, torch.float32)
    group = v.shape[1] // k.shape[1]
    query, key = (chunks.gather(x.to(dtype)).transpose(1, 2).repeat_interleave(group, 1) for x in (q, k))
    value, log_decay, strength = (chunks.gather(x.to(dtype)).transpose(1, 2) for x in (v, g, beta))
    total = log_decay.cumsum(-1)
    causal = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).tril()
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    relative = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    lower = strength[..., None] * (key @ key.mT) * relative
    known = torch.cat([strength[..., None] * value, (strength * total.exp())[..., None] * key], -1)
    # `unitriangular` takes the diagonal as one, whatever `lower` holds there.
    solved = torch.linalg.solve_triangular(lower, known, upper=False, unitriangular=True)
    return _ChunkTerms(
        value=solved[..., : value.shape[-1]],
        key=solved[..., value.shape[-1] :],
        query=scale * total.exp()[..., None] * query,
        attention=scale * (query @ key.mT) * relative,
        key_to_end=(total[..., -1:] - total).exp()[..., None] * key,
        decay=total[..., -1].exp(),
    )


def require_checkpoint(
    k: Tensor, corrected_values: Tensor, decay_sums: Tensor, chunk_states: Tensor, spans: Spans, pool: Tensor
) -> None:
    """Raise ValueError for arguments that `checkpoint` does not take."""
    if k.dim() != 3 or not k.is_floating_point():
        raise ValueError(
            f"k has shape {tuple(k.shape)} and dtype {k.dtype}: "
            "expected (num_tokens, num_key_heads, key_dim) of a float dtype"
        )
    num_tokens, num_key_heads, key_dim = k.shape
    if (
        corrected_values.dim() != 3
        or corrected_values.shape[0] != num_tokens
        or corrected_values.shape[1] % num_key_heads
    ):
        raise ValueError(
            f"corrected_values has shape {tuple(corrected_values.shape)}: expected ({num_tokens}, num_value_heads, "
            f"value_dim) with a multiple of {num_key_heads} heads"
        )
    _, num_heads, value_dim = corrected_values.shape
    state_shape = (num_heads, value_dim, key_dim)
    for name, tensor, shape in (
        ("corrected_values", corrected_values, (num_tokens, num_heads, value_dim)),
        ("decay_sums", decay_sums, (num_tokens, num_heads)),
        ("chunk_states", chunk_states, (*chunk_states.shape[:1], *state_shape)),
        ("pool", pool, (*pool.shape[:1], *state_shape)),
    ):
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: expected {shape} of a float dtype"
            )
    spans.require_tokens(num_tokens)
    spans.require_chunks()
    spans.require_chunk_states(chunk_states)
    spans.require_slots(pool)


def require_advance(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_states: Tensor | None,
    initial_states: Tensor | None,
    spans: Spans,
    pool: Tensor,
) -> None:
    """Raise ValueError for arguments that `advance` does not take."""
    if k.dim() != 3 or not k.is_floating_point():
        raise ValueError(
            f"k has shape {tuple(k.shape)} and dtype {k.dtype}: "
            "expected (num_tokens, num_key_heads, key_dim) of a float dtype"
        )
    num_tokens, num_key_heads, key_dim = k.shape
    if v.dim() != 3 or not v.is_floating_point() or v.shape[0] != num_tokens or v.shape[1] % max(num_key_heads, 1):
        raise ValueError(
            f"v has shape {tuple(v.shape)} and dtype {v.dtype}: expected ({num_tokens}, num_value_heads, value_dim) "
            f"of a float dtype with a multiple of {num_key_heads} heads"
        )
    state_shape = (*v.shape[1:], key_dim)
    for name, tensor, shape in (
        ("g", g, tuple(v.shape[:2])),
        ("beta", beta, tuple(v.shape[:2])),
        ("chunk_states", chunk_states, state_shape),
        ("initial_states", initial_states, state_shape),
        ("pool", pool, state_shape),
    ):
        if tensor is None:
            continue
        expected = shape if len(shape) == 2 else (*tensor.shape[:1], *shape)
        if tuple(tensor.shape) != expected or not tensor.is_floating_point():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: expected {expected} of a float dtype"
            )
    spans.require_tokens(num_tokens)
    spans.require_chunk_states(chunk_states)
    if initial_states is not None:
        spans.require_sequences(initial_states.shape[0], "initial_states")
    spans.require_slots(pool)


def _require_inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    if v.dim() != 3 or not v.is_floating_point():
        raise ValueError(
            f"v has shape {tuple(v.shape)} and dtype {v.dtype}: "
            "expected (num_tokens, num_value_heads, value_dim) of a float dtype"
        )
    if k.dim() != 3 or k.shape[0] != v.shape[0] or k.shape[1] == 0 or v.shape[1] % k.shape[1]:
        raise ValueError(
            f"k has shape {tuple(k.shape)}: expected (num_tokens, num_key_heads, key_dim) "
            f"with {v.shape[0]} tokens and a divisor of {v.shape[1]} heads"
        )
    if q.shape != k.shape:
        raise ValueError(f"q has shape {tuple(q.shape)}: expected that of k, {tuple(k.shape)}")
    if q.dtype != v.dtype or k.dtype != v.dtype:
        raise ValueError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}: expected one dtype")
    for name, gate in (("g", g), ("beta", beta)):
        if gate.shape != v.shape[:2] or not gate.is_floating_point():
            raise ValueError(
                f"{name} has shape {tuple(gate.shape)} and dtype {gate.dtype}: "
                f"expected {tuple(v.shape[:2])} of a float dtype"
            )
