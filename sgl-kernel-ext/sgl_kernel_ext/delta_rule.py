"""The delta rule over chunks, whatever its decay: what `gated_delta_rule` and `kda` have in common.

A head keeps a matrix S (value_dim, key_dim). A token decays it by exp(g), replaces the value that it holds for the key
k by a share beta of the new value v, and reads it with the query q:

    u_t = beta_t (v_t - exp(g_t) S_{t-1} k_t)        the corrected value
    S_t = exp(g_t) S_{t-1} + u_t k_t^T
    o_t = scale S_t q_t

where exp(g_t) is one number (`gated_delta_rule`) or one for each key channel (`kda`). Within a chunk the corrected
values solve a unit lower triangular system, linear in the chunk's start state S_0:

    u = T beta v - (T beta exp(G) k) S_0^T           T = (I + L)^-1, G_t = g_1 + ... + g_t

An operator makes the terms without S_0 (`ChunkTerms`) for all chunks at once; `prefill` carries the state through them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext import varlen
from sgl_kernel_ext.arguments import require, require_one_dtype, require_shared
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.state_pool import StateSlots, initial_states

CHUNK_SIZE = 64


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """The results of a prefill.

    `outputs` (num_tokens, num_value_heads, value_dim) has the dtype of v; the rest has the dtype of the computation.
    `chunk_states` (num_chunks, num_value_heads, value_dim, key_dim) is the state before each chunk, chunks counted
    from the start of each sequence and sequences in order; `corrected_values` (num_tokens, num_value_heads, value_dim)
    is u and `decay_sums`, of the shape of g, is G; `final_states` (num_sequences, num_value_heads, value_dim, key_dim).
    """

    outputs: Tensor
    chunk_states: Tensor
    corrected_values: Tensor
    decay_sums: Tensor
    final_states: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTerms:
    """The terms of a chunk apart from its start state; (num_chunks, num_value_heads, num_places, ...).

    `value` T beta v, `key` T beta exp(G) k, `query` scale exp(G) q, `attention` the masked scale exp(G_t - G_s) q_t .
    k_s, `key_to_end` exp(G_end - G) k, and `decay_sums` G, without a last axis where a head has one decay.
    """

    value: Tensor
    key: Tensor
    query: Tensor
    attention: Tensor
    key_to_end: Tensor
    decay_sums: Tensor

    @property
    def decay(self) -> Tensor:
        """exp(G_end), by which a chunk decays its start state: (num_chunks, num_value_heads, 1, key_dim or 1)."""
        return _over_state(self.decay_sums[:, :, -1].exp())


MakeTerms = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], ChunkTerms]
"""Makes them of q, k, v, g and beta (num_chunks, num_value_heads, num_places, ...) and the scale."""


def prefill(
    make_terms: MakeTerms,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor,
    states: StateSlots | None,
    scale: float | None,
    chunk_size: int,
) -> Prefill:
    """Run whole sequences, each from its slot of `states` and back into it, or from zero without `states`."""
    num_tokens, num_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    varlen.require_cu_seqlens(cu_seqlens, num_tokens)
    dtype = torch.promote_types(v.dtype, torch.float32)
    state_shape = (num_heads, value_dim, key_dim)
    carried = initial_states(states, cu_seqlens.shape[0] - 1, state_shape, dtype, v.device)
    chunks = varlen.per_sequence(cu_seqlens, chunk_size)
    group = num_heads // k.shape[1]
    query, key = (chunks.gather(x.to(dtype)).transpose(1, 2).repeat_interleave(group, 1) for x in (q, k))
    value, log_decay, strength = (chunks.gather(x.to(dtype)).transpose(1, 2) for x in (v, g, beta))
    terms = make_terms(query, key, value, log_decay, strength, key_dim**-0.5 if scale is None else scale)

    decay = terms.decay
    chunk_states = carried.new_empty(chunks.starts.shape[0], *state_shape)
    corrected = torch.empty_like(terms.value)
    for step in chunks.steps:
        start = carried[step.sequences]
        chunk_states[step.chunks] = start
        u = terms.value[step.chunks] - terms.key[step.chunks] @ start.mT
        corrected[step.chunks] = u
        carried[step.sequences] = decay[step.chunks] * start + u.mT @ terms.key_to_end[step.chunks]
    outputs = terms.query @ chunk_states.mT + terms.attention @ corrected

    flat, corrected_values, decay_sums = (
        chunks.scatter(each.transpose(1, 2), num_tokens) for each in (outputs, corrected, terms.decay_sums)
    )
    flat = flat.to(v.dtype)
    if states is not None:
        flat[states.is_padding[varlen.sequence_of_token(cu_seqlens)]] = 0
        states.write(carried)
    return Prefill(flat, chunk_states, corrected_values, decay_sums, carried)


def decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, states: StateSlots, scale: float | None
) -> Tensor:
    """Run one token of every sequence: update its slot in place, return (num_sequences, num_value_heads, value_dim)."""
    num_sequences, num_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    states.require(num_sequences, (num_heads, value_dim, key_dim))
    dtype = torch.promote_types(v.dtype, torch.float32)
    group = num_heads // k.shape[1]
    query = q.to(dtype).repeat_interleave(group, 1) * (key_dim**-0.5 if scale is None else scale)
    key = k.to(dtype).repeat_interleave(group, 1)
    decayed = _over_state(g.to(dtype).exp()) * states.read(dtype)
    u = beta.to(dtype)[..., None] * (v.to(dtype) - (decayed @ key[..., None]).squeeze(-1))
    updated = decayed + u[..., None] * key[..., None, :]
    states.write(updated)
    outputs = (updated @ query[..., None]).squeeze(-1)
    return outputs.masked_fill(states.is_padding[:, None, None], 0).to(v.dtype)


def solve(lower: Tensor, value: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply `value` and `key` by (I + lower)^-1, whatever stands on and above the diagonal of `lower`."""
    known = torch.cat([value, key], -1)
    # `unitriangular` takes the diagonal as one.
    solved: Tensor = torch.linalg.solve_triangular(lower, known, upper=False, unitriangular=True)
    return solved[..., : value.shape[-1]], solved[..., value.shape[-1] :]


def require_inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, has_channel_decay: bool) -> None:
    """Raise ValueError for tokens that `prefill` and `decode` do not take."""
    require_keys_and_values(k, v, "v")
    require("q", q, k.shape)
    require_one_dtype(q=q, k=k, v=v)
    require_gates(k, v, has_channel_decay=has_channel_decay, g=g)
    require_gates(k, v, has_channel_decay=False, beta=beta)


def require_checkpoint(
    k: Tensor,
    corrected_values: Tensor,
    decay_sums: Tensor,
    chunk_states: Tensor,
    spans: Spans,
    pool: Tensor,
    *,
    has_channel_decay: bool,
    snapshots: Tensor | None = None,
) -> None:
    """Raise ValueError for arguments that `checkpoint` does not take."""
    k, corrected_values, decay_sums, chunk_states = of_batch(k, corrected_values, decay_sums, chunk_states)
    require_keys_and_values(k, corrected_values, "corrected_values")
    require_gates(k, corrected_values, has_channel_decay=has_channel_decay, decay_sums=decay_sums)
    require_states(k, corrected_values, chunk_states=chunk_states, snapshots=snapshots, pool=pool)
    if snapshots is None:
        spans.require_chunks()
    else:
        spans.require_sequences("snapshots", snapshots.shape[0])
    spans.require_chunk_states(chunk_states)
    spans.require_batch(k.shape[0], pool)


def of_batch(k: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Return k (num_tokens, num_key_heads, key_dim) and `others` without the dimension of 1 that all may begin with."""
    if k.dim() == 4 and all(each.dim() and each.shape[0] == 1 for each in (k, *others)):
        return tuple(each[0] for each in (k, *others))
    return k, *others


def require_keys_and_values(k: Tensor, v: Tensor, name: str) -> None:
    """Raise ValueError unless `k` and `v`, called `name`, are of the same tokens and heads."""
    require("k", k, ("num_tokens", "num_key_heads", "key_dim"))
    require(name, v, (k.shape[0], "num_value_heads", "value_dim"))
    require_shared("k", k, v.shape[1])


def require_gates(k: Tensor, v: Tensor, *, has_channel_decay: bool, **gates: Tensor) -> None:
    """Raise ValueError unless each of `gates` has a number for each token and head, or for each of its key channels."""
    for name, gate in gates.items():
        require(name, gate, (*v.shape[:2], k.shape[2]) if has_channel_decay else v.shape[:2])


def require_states(k: Tensor, v: Tensor, **states: Tensor | None) -> None:
    """Raise ValueError unless each of `states` that is given has rows of the shape of a state."""
    for name, tensor in states.items():
        if tensor is not None:
            require(name, tensor, ("num_rows", *v.shape[1:], k.shape[2]))


def _over_state(decay: Tensor) -> Tensor:
    """Shape decays (n, num_value_heads[, key_dim]) to multiply states (n, num_value_heads, value_dim, key_dim)."""
    return (decay if decay.dim() == 3 else decay[..., None])[..., None, :]
