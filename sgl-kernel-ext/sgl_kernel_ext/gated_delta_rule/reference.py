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
between. Keys are expected to have unit length; the system stays well conditioned for them.
"""

import torch
from torch import Tensor

from sgl_kernel_ext import delta_rule
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.delta_rule import CHUNK_SIZE, ChunkTerms, Prefill
from sgl_kernel_ext.state_pool import StateSlots


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
    delta_rule.require_inputs(q, k, v, g, beta, has_channel_decay=False)
    return delta_rule.prefill(
        _chunk_terms, q, k, v, g, beta, cu_seqlens=cu_seqlens, states=states, scale=scale, chunk_size=chunk_size
    )


def decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, states: StateSlots, scale: float | None = None
) -> Tensor:
    """Run one token of every sequence: update its slot in place, return (num_sequences, num_value_heads, value_dim).

    Shapes, dtypes and errors are those of `prefill`, with one token a sequence.
    """
    delta_rule.require_inputs(q, k, v, g, beta, has_channel_decay=False)
    return delta_rule.decode(q, k, v, g, beta, states=states, scale=scale)


def checkpoint(
    k: Tensor, corrected_values: Tensor, decay_sums: Tensor, chunk_states: Tensor, *, spans: Spans, pool: Tensor
) -> None:
    """Write the states at the ends of `spans` to their slots of `pool`, from what a prefill left.

    k (num_tokens, num_key_heads, key_dim), as the recurrence sees it; corrected_values (num_tokens, num_value_heads,
    value_dim), decay_sums (num_tokens, num_value_heads) and chunk_states (num_chunks, num_value_heads, value_dim,
    key_dim) of any float dtype, all four perhaps with a dimension of 1 in front; `spans` on the grid of each sequence,
    of the prefill's chunk size; pool (num_slots, num_value_heads, value_dim, key_dim) of any float dtype and strides.
    Computes in float32, in float64 for float64 inputs. Raises ValueError for other shapes and dtypes and for a slot
    outside the pool.
    """
    require_checkpoint(k, corrected_values, decay_sums, chunk_states, spans, pool)
    k, corrected_values, decay_sums, chunk_states = delta_rule.of_batch(k, corrected_values, decay_sums, chunk_states)
    dtype = torch.promote_types(corrected_values.dtype, torch.float32)
    # One span after the other: there are few, and slices take a CPU less than half the time of gathering them all.
    for _, chunk, start, end, slot in spans.rows():
        state = chunk_states[chunk].to(dtype)
        if start < end:
            sums, keys = decay_sums[start:end].to(dtype), k[start:end].to(dtype)
            at_end = sums[-1]
            weighted = (at_end - sums).exp()[..., None] * corrected_values[start:end].to(dtype)
            # Value heads that share a key head lie side by side.
            written = weighted.reshape(len(keys), k.shape[1], -1).permute(1, 2, 0) @ keys.transpose(0, 1)
            state = at_end.exp()[:, None, None] * state + written.view(state.shape)
        pool[slot] = state


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
    start = spans.start_states(chunk_states, initial_states, pool.shape[1:], dtype)
    tokens, is_token = spans.tokens()
    own = tokens[is_token]
    keys, values = k[own].to(dtype), v[own].to(dtype)
    bounds = torch.nn.functional.pad((spans.ends - spans.starts).cumsum(0), (1, 0))
    states = StateSlots(start, torch.arange(len(spans), device=pool.device))
    made = prefill(keys, keys, values, g[own], beta[own], cu_seqlens=bounds, states=states)
    pool[spans.slots] = made.final_states.to(pool.dtype)


def _chunk_terms(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, scale: float
) -> ChunkTerms:
    total = log_decay.cumsum(-1)
    causal = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).tril()
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    relative = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    lower = strength[..., None] * (key @ key.mT) * relative
    corrected, weighted = delta_rule.solve(
        lower, strength[..., None] * value, (strength * total.exp())[..., None] * key
    )
    return ChunkTerms(
        value=corrected,
        key=weighted,
        query=scale * total.exp()[..., None] * query,
        attention=scale * (query @ key.mT) * relative,
        key_to_end=(total[..., -1:] - total).exp()[..., None] * key,
        decay_sums=total,
    )


def require_checkpoint(
    k: Tensor, corrected_values: Tensor, decay_sums: Tensor, chunk_states: Tensor, spans: Spans, pool: Tensor
) -> None:
    """Raise ValueError for arguments that `checkpoint` does not take."""
    delta_rule.require_checkpoint(k, corrected_values, decay_sums, chunk_states, spans, pool, has_channel_decay=False)


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
    delta_rule.require_keys_and_values(k, v, "v")
    delta_rule.require_gates(k, v, has_channel_decay=False, g=g, beta=beta)
    delta_rule.require_states(k, v, chunk_states=chunk_states, initial_states=initial_states, pool=pool)
    spans.require_chunk_states(chunk_states)
    if initial_states is not None:
        spans.require_sequences("initial_states", initial_states.shape[0])
    spans.require_batch(k.shape[0], pool)
