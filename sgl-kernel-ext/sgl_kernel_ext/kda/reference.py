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

import torch
from torch import Tensor

from sgl_kernel_ext import delta_rule
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.delta_rule import CHUNK_SIZE, ChunkTerms, Prefill
from sgl_kernel_ext.state_pool import StateSlots

_BLOCK = 16


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
    delta_rule.require_inputs(q, k, v, g, beta, has_channel_decay=True)
    return delta_rule.prefill(
        _chunk_terms, q, k, v, g, beta, cu_seqlens=cu_seqlens, states=states, scale=scale, chunk_size=chunk_size
    )


def decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, states: StateSlots, scale: float | None = None
) -> Tensor:
    """Run one token of every sequence: update its slot in place, return (num_sequences, num_value_heads, value_dim).

    Shapes, dtypes and errors are those of `prefill`, with one token a sequence.
    """
    delta_rule.require_inputs(q, k, v, g, beta, has_channel_decay=True)
    return delta_rule.decode(q, k, v, g, beta, states=states, scale=scale)


def checkpoint(
    k: Tensor,
    corrected_values: Tensor,
    decay_sums: Tensor,
    chunk_states: Tensor,
    *,
    spans: Spans,
    pool: Tensor,
    log_base: float = math.e,
    snapshots: Tensor | None = None,
) -> None:
    """Write the states at the ends of `spans` to their slots of `pool`, from what a prefill left.

    k (num_tokens, num_key_heads, key_dim), as the recurrence sees it; corrected_values (num_tokens, num_value_heads,
    value_dim), decay_sums (num_tokens, num_value_heads, key_dim), to the base `log_base`, and chunk_states (num_chunks,
    num_value_heads, value_dim, key_dim) of any float dtype, all four perhaps with a dimension of 1 in front; `spans` on
    the grid of each sequence, of the prefill's chunk size; snapshots (num_sequences, num_value_heads, value_dim,
    key_dim) of any float dtype, the states that spans without a chunk start from, of which no others are read; pool
    (num_slots, num_value_heads, value_dim, key_dim) of any float dtype and strides. Computes in float32, in float64 for
    float64 inputs. Raises ValueError for other shapes and dtypes, for a span that has neither chunk nor snapshot, for a
    base that is not above one and for a slot outside the pool.
    """
    require_checkpoint(k, corrected_values, decay_sums, chunk_states, spans, pool, log_base, snapshots)
    if not len(spans):
        return
    k, corrected_values, decay_sums, chunk_states = delta_rule.of_batch(k, corrected_values, decay_sums, chunk_states)
    dtype = torch.promote_types(corrected_values.dtype, torch.float32)
    natural = math.log(log_base)
    keys, values, sums = spans.gather(dtype, k, corrected_values, decay_sums)
    at_end = natural * spans.at_end(decay_sums, dtype)
    keys = spans.decay_to_end(natural * sums, at_end) * keys.repeat_interleave(values.shape[2] // k.shape[1], 2)
    written = torch.einsum("cthv,cthk->chvk", values, keys)
    states = spans.start_states(chunk_states, snapshots, pool.shape[1:], dtype) * at_end.exp()[..., None, :] + written
    pool[spans.slots] = states.to(pool.dtype)


def _chunk_terms(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, scale: float
) -> ChunkTerms:
    total = log_decay.cumsum(-2)
    weighted = strength[..., None] * key
    lower, attention = _decayed_products((weighted, scale * query), key, total)
    corrected, weighted = delta_rule.solve(lower, strength[..., None] * value, weighted * total.exp())
    return ChunkTerms(
        value=corrected,
        key=weighted,
        query=scale * total.exp() * query,
        attention=attention,
        key_to_end=(total[..., -1:, :] - total).exp() * key,
        decay_sums=total,
    )


def _decayed_products(rows: tuple[Tensor, ...], keys: Tensor, total: Tensor) -> list[Tensor]:
    """Compute for each of `rows`, (..., t, s): sum_d row_td key_sd exp(G_td - G_sd) for s <= t, else 0.

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
    snapshots: Tensor | None,
) -> None:
    """Raise ValueError for arguments that `checkpoint` does not take."""
    if not 1 < log_base < math.inf:
        raise ValueError(f"log_base must be a number above 1, the base of decay_sums, got {log_base}")
    delta_rule.require_checkpoint(
        k, corrected_values, decay_sums, chunk_states, spans, pool, has_channel_decay=True, snapshots=snapshots
    )
