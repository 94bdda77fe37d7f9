"""Kimi Delta Attention in torch: prefill over chunks, and one decode step.

A head keeps a matrix S (value_dim, key_dim). A token decays each key channel of it by a factor of its own, replaces the
value it holds for the key k by a share beta of the new value v, and reads it with the query q (Kimi Linear, arXiv
2510.26692, section 3):

    u_t = beta_t (v_t - S_{t-1} (exp(g_t) * k_t))        the corrected value
    S_t = S_{t-1} diag(exp(g_t)) + u_t k_t^T
    o_t = scale S_t q_t

Within a chunk with start state S_0 and G_t = g_1 + ... + g_t, a row of key channels, the corrected values solve a unit
lower triangular system, once for all tokens and heads:

    (I + L) u = beta v - beta (exp(G) * k) S_0^T         L_ts = beta_t sum_d k_td k_sd exp(G_td - G_sd)  for s < t
    S_t = S_0 diag(exp(G_t)) + sum_{s <= t} u_s (exp(G_t - G_s) * k_s)^T

The last line gives the state at any token from the chunk's start state and the corrected values: `Prefill` returns
both, with G, and `checkpoint` evaluates it.

L is no masked matrix product as it is with one decay a head: exp(-G_s) alone overflows. The products are taken in
blocks of `_BLOCK` tokens. For a block that starts after token r, and s <= r < t,

    exp(G_t - G_s) = exp(G_t - G_r) exp(G_r - G_s)       neither factor above one

and within a block the differences are taken one by one.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext import varlen
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.state_pool import StateSlots, initial_states
from sgl_kernel_ext.varlen import Chunks

CHUNK_SIZE = 64
_BLOCK = 16


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What a prefill computed.

    `outputs` (num_tokens, num_value_heads, value_dim) has the dtype of v; the rest has the dtype of the computation.
    `chunk_states` (num_chunks, num_value_heads, value_dim, key_dim) is the state before each chunk, chunks counted
    from the start of each sequence and sequences in order; `corrected_values` (num_tokens, num_value_heads, value_dim)
    is u and `decay_sums` (num_tokens, num_value_heads, key_dim) is G; `final_states` (num_sequences, num_value_heads,
    value_dim, key_dim).
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
    of the decays) (num_tokens, num_value_heads, key_dim) and beta (num_tokens, num_value_heads) of any float dtype;
    cu_seqlens (num_sequences + 1,) integer; a slot holds (num_value_heads, value_dim, key_dim). `scale` is
    key_dim ** -0.5 unless given. Computes in float32, in float64 for float64 inputs. Raises ValueError for other shapes
    and dtypes.
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
        carried[step.sequences] = start * terms.decay[step.chunks][..., None, :] + u.mT @ terms.key_to_end[step.chunks]
    outputs = terms.query @ chunk_states.mT + terms.attention @ corrected

    flat = chunks.scatter(outputs.transpose(1, 2), num_tokens).to(v.dtype)
    if states is not None:
        flat[states.is_padding[varlen.sequence_of_token(cu_seqlens)]] = 0
        states.write(carried)
    corrected_values = chunks.scatter(corrected.transpose(1, 2), num_tokens)
    decay_sums = chunks.scatter(terms.decay_sums.transpose(1, 2), num_tokens)
    return Prefill(flat, chunk_states, corrected_values, decay_sums, carried)


def checkpoint(
    k: Tensor,
    corrected_values: Tensor,
    decay_sums: Tensor,
    chunk_states: Tensor,
    *,
    spans: Spans,
    pool: Tensor,
    log_base: float = math.e,
) -> None:
    """Write the states at the ends of `spans` to their slots of `pool`, from what a prefill left.

    k (num_tokens, num_key_heads, key_dim), as the recurrence sees it; corrected_values (num_tokens, num_value_heads,
    value_dim), decay_sums (num_tokens, num_value_heads, key_dim), to the base `log_base`, and chunk_states (num_chunks,
    num_value_heads, value_dim, key_dim) of any float dtype; `spans` on the grid of each sequence, of the prefill's
    chunk size; pool (num_slots, num_value_heads, value_dim, key_dim) of any float dtype and strides. Computes in
    float32, in float64 for float64 inputs. Raises ValueError for other shapes and dtypes, for a base that is not above
    one and for a slot outside the pool.
    """
    require_checkpoint(k, corrected_values, decay_sums, chunk_states, spans, pool, log_base)
    if not len(spans):
        return
    dtype = torch.promote_types(corrected_values.dtype, torch.float32)
    tokens, is_token = spans.tokens()
    group = corrected_values.shape[1] // k.shape[1]

    def taken(values: Tensor) -> Tensor:
        return torch.where(is_token[..., None, None], values[tokens].to(dtype), 0)

    natural = math.log(log_base)
    total = natural * taken(decay_sums)
    at_end = natural * decay_sums[(spans.ends - 1).clamp(0)].to(dtype)
    at_end = torch.where((spans.ends > spans.starts)[:, None, None], at_end, 0)
    # Masked before exp: behind the span the difference is positive and may overflow.
    weight = (at_end[:, None] - total).masked_fill(~is_token[..., None, None], -torch.inf).exp()
    keys = weight * taken(k).repeat_interleave(group, 2)
    written = torch.einsum("cthv,cthk->chvk", taken(corrected_values), keys)
    states = chunk_states[spans.chunks].to(dtype) * at_end.exp()[..., None, :] + written
    pool[spans.slots] = states.to(pool.dtype)


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
    decayed = g.to(dtype).exp()[..., None, :] * states.read(dtype)
    corrected = beta.to(dtype)[..., None] * (v.to(dtype) - (decayed @ key[..., None]).squeeze(-1))
    updated = decayed + corrected[..., None] * key[..., None, :]
    states.write(updated)
    outputs = (updated @ query[..., None]).squeeze(-1)
    return outputs.masked_fill(states.is_padding[:, None, None], 0).to(v.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _ChunkTerms:
    """What a chunk needs apart from its start state; (num_chunks, num_value_heads, num_places, ...) unless said.

    With T = (I + L)^-1: `value` T beta v, `key` T beta (exp(G) * k), `query` scale exp(G) * q, `attention` the masked
    scale sum_d q_td k_sd exp(G_td - G_sd), `key_to_end` exp(G_end - G) * k, `decay` (num_chunks, num_value_heads,
    key_dim) exp(G_end) and `decay_sums` G.
    """

    value: Tensor
    key: Tensor
    query: Tensor
    attention: Tensor
    key_to_end: Tensor
    decay: Tensor
    decay_sums: Tensor


def _chunk_terms(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, chunks: Chunks) -> _ChunkTerms:
    dtype = torch.promote_types(v.dtype, torch.float32)
    group = v.shape[1] // k.shape[1]
    query, key = (chunks.gather(x.to(dtype)).transpose(1, 2).repeat_interleave(group, 1) for x in (q, k))
    value, log_decay, strength = (chunks.gather(x.to(dtype)).transpose(1, 2) for x in (v, g, beta))
    total = log_decay.cumsum(-2)
    weighted = strength[..., None] * key
    lower, attention = _decayed_products((weighted, scale * query), key, total)
    known = torch.cat([strength[..., None] * value, weighted * total.exp()], -1)
    # `unitriangular` takes the diagonal as one, whatever `lower` holds there.
    solved = torch.linalg.solve_triangular(lower, known, upper=False, unitriangular=True)
    return _ChunkTerms(
        value=solved[..., : value.shape[-1]],
        key=solved[..., value.shape[-1] :],
        query=scale * total.exp() * query,
        attention=attention,
        key_to_end=(total[..., -1:, :] - total).exp() * key,
        decay=total[..., -1, :].exp(),
        decay_sums=total,
    )


def _decayed_products(rows: tuple[Tensor, ...], keys: Tensor, total: Tensor) -> list[Tensor]:
    """For each of `rows`, (..., t, s): sum_d row_td key_sd exp(G_td - G_sd) for s <= t, else 0.

    All are (..., num_places, key_dim).
    """
    num_places = keys.shape[-2]
    products = [keys.new_zeros(*keys.shape[:-1], num_places) for _ in rows]
    for start in range(0, num_places, _BLOCK):
        own = slice(start, min(start + _BLOCK, num_places))
        size = own.stop - start
        causal = torch.ones(size, size, dtype=torch.bool, device=keys.device).tril()
        # Masked before exp: above the diagonal the difference is positive and may overflow.
        within = total[..., own, None, :] - total[..., None, own, :]
        within = within.masked_fill(~causal[..., None], -torch.inf).exp() * keys[..., None, own, :]
        for row, product in zip(rows, products, strict=True):
            product[..., own, own] = (within @ row[..., own, :, None]).squeeze(-1)
        if start:
            before = total[..., start - 1 : start, :]
            earlier = ((before - total[..., :start, :]).exp() * keys[..., :start, :]).mT
            later = (total[..., own, :] - before).exp()
            for row, product in zip(rows, products, strict=True):
                product[..., own, :start] = (later * row[..., own, :]) @ earlier
    return products


def require_checkpoint(
    k: Tensor,
    corrected_values: Tensor,
    decay_sums: Tensor,
    chunk_states: Tensor,
    spans: Spans,
    pool: Tensor,
    log_base: float,
) -> None:
    """Raise ValueError for arguments that `checkpoint` does not take."""
    if not 1 < log_base < math.inf:
        raise ValueError(f"log_base is {log_base}: expected a number above 1, the base of decay_sums")
    if k.dim() != 3 or not k.is_floating_point():
        raise ValueError(
            f"k has shape {tuple(k.shape)} and dtype {k.dtype}: "
            "expected (num_tokens, num_key_heads, key_dim) of a float dtype"
        )
    num_tokens, num_key_heads, key_dim = k.shape
    if (
        corrected_values.dim() != 3
        or corrected_values.shape[0] != num_tokens
        or corrected_values.shape[1] % max(num_key_heads, 1)
    ):
        raise ValueError(
            f"corrected_values has shape {tuple(corrected_values.shape)}: expected ({num_tokens}, num_value_heads, "
            f"value_dim) with a multiple of {num_key_heads} heads"
        )
    _, num_heads, value_dim = corrected_values.shape
    state_shape = (num_heads, value_dim, key_dim)
    for name, tensor, shape in (
        ("corrected_values", corrected_values, (num_tokens, num_heads, value_dim)),
        ("decay_sums", decay_sums, (num_tokens, num_heads, key_dim)),
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
    for name, gate, shape in (("g", g, (*v.shape[:2], k.shape[2])), ("beta", beta, tuple(v.shape[:2]))):
        if tuple(gate.shape) != shape or not gate.is_floating_point():
            raise ValueError(
                f"{name} has shape {tuple(gate.shape)} and dtype {gate.dtype}: expected {shape} of a float dtype"
            )
