"""Linear attention with a constant decay in torch: prefill over chunks, and one decode step.

A head keeps a matrix S (key_dim, value_dim), in this order as SGLang's pool lies. A token decays it by the head's own
factor exp(log_decay), adds its value under its key, and reads it with the query (Lightning Attention-2, arXiv
2401.04658, equation 4):

    S_t = exp(log_decay) S_{t-1} + k_t v_t^T
    o_t = scale S_t^T q_t

After n tokens from a state S_0 this is

    S_n = exp(n log_decay) S_0 + sum_{i <= n} exp((n - i) log_decay) k_i v_i^T

one masked product, whatever n: the state at any token follows from any state before it and the tokens in between, with
no scan and nothing that a prefill would have to leave. `checkpoint` evaluates it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_kernel_ext import varlen
from sgl_kernel_ext.checkpoints import NO_CHUNK, Spans
from sgl_kernel_ext.state_pool import StateSlots, initial_states

CHUNK_SIZE = 64
_BLOCK_TOKENS = 1024
"""Tokens of a span taken in at once: bounds the memory that a long one takes."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """What a prefill computed.

    `outputs` (num_tokens, num_value_heads, value_dim) has the dtype of v; states have the dtype of the computation.
    `chunk_states` (num_chunks, num_value_heads, key_dim, value_dim) is the state before each chunk, chunks counted from
    the start of each sequence and sequences in order; `final_states` (num_sequences, num_value_heads, key_dim,
    value_dim).
    """

    outputs: Tensor
    chunk_states: Tensor
    final_states: Tensor


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    cu_seqlens: Tensor,
    states: StateSlots | None = None,
    scale: float | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Prefill:
    """Run whole sequences, each from its slot of `states` and back into it, or from zero without `states`.

    q and k (num_tokens, num_key_heads, key_dim), v (num_tokens, num_value_heads, value_dim) of one float dtype, where
    num_key_heads divides num_value_heads and value head h uses key head h // (num_value_heads / num_key_heads);
    log_decay (num_value_heads,) of any float dtype, at most 0; cu_seqlens (num_sequences + 1,) integer; a slot holds
    (num_value_heads, key_dim, value_dim). `scale` is key_dim ** -0.5 unless given. Computes in float32, in float64 for
    float64 inputs. Raises ValueError for other shapes and dtypes.
    """
    _require_inputs(q, k, v, log_decay)
    num_tokens, num_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    varlen.require_cu_seqlens(cu_seqlens, num_tokens)
    num_sequences = cu_seqlens.shape[0] - 1
    dtype = torch.promote_types(v.dtype, torch.float32)
    carried = initial_states(states, num_sequences, (num_heads, key_dim, value_dim), dtype, v.device)
    chunks = varlen.per_sequence(cu_seqlens, chunk_size)

    group = num_heads // k.shape[1]
    scale = key_dim**-0.5 if scale is None else scale
    query, key = (chunks.gather(x.to(dtype)).transpose(1, 2).repeat_interleave(group, 1) for x in (q, k))
    value = chunks.gather(v.to(dtype)).transpose(1, 2)
    total = log_decay.to(dtype)[:, None] * chunks.is_token.to(dtype).cumsum(-1)[:, None]
    to_end = (total[..., -1:] - total).exp()[..., None]
    increments = (to_end * key).mT @ value
    decay = total[..., -1].exp()[..., None, None]

    chunk_states = torch.empty_like(increments)
    for step in chunks.steps:
        start = carried[step.sequences]
        chunk_states[step.chunks] = start
        carried[step.sequences] = decay[step.chunks] * start + increments[step.chunks]

    causal = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).tril()
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    relative = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    outputs = ((query @ key.mT) * relative) @ value + total.exp()[..., None] * (query @ chunk_states)

    flat = chunks.scatter(scale * outputs.transpose(1, 2), num_tokens).to(v.dtype)
    if states is not None:
        flat[states.is_padding[varlen.sequence_of_token(cu_seqlens)]] = 0
        states.write(carried)
    return Prefill(flat, chunk_states, carried)


def checkpoint(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    chunk_states: Tensor | None,
    *,
    spans: Spans,
    pool: Tensor,
    initial_states: Tensor | None = None,
) -> None:
    """Write the states at the ends of `spans`, of any length, to their slots of `pool`.

    k (num_tokens, num_key_heads, key_dim), v (num_tokens, num_value_heads, value_dim) and log_decay (num_value_heads,),
    as `prefill` takes them; chunk_states (num_chunks, num_value_heads, key_dim, value_dim), or absent where no span
    starts from a chunk; initial_states (num_sequences, num_value_heads, key_dim, value_dim), zero if absent, of which
    only spans without a chunk are read; pool (num_slots, num_value_heads, key_dim, value_dim); all of any float dtype,
    the pool of any strides. Computes in float32, in float64 for float64 inputs. Raises ValueError for other shapes and
    dtypes, for chunks or initial states that spans need and are not there, and for a slot outside the pool.
    """
    require_checkpoint(k, v, log_decay, chunk_states, initial_states, spans, pool)
    if not len(spans):
        return
    dtype = torch.promote_types(v.dtype, torch.float32)
    group = v.shape[1] // k.shape[1]
    per_token = log_decay.to(dtype)
    from_chunk = spans.chunks != NO_CHUNK
    states = torch.zeros(len(spans), *pool.shape[1:], dtype=dtype, device=pool.device)
    if chunk_states is not None:
        states[from_chunk] = chunk_states[spans.chunks[from_chunk]].to(dtype)
    if initial_states is not None:
        states[~from_chunk] = initial_states[spans.sequences[~from_chunk]].to(dtype)
    states *= (per_token * (spans.ends - spans.starts)[:, None]).exp()[..., None, None]
    tokens, is_token = spans.tokens()
    for first in range(0, spans.max_tokens, _BLOCK_TOKENS):
        block, taken = (each[:, first : first + _BLOCK_TOKENS] for each in (tokens, is_token))
        behind = (spans.ends[:, None] - 1 - block).to(dtype)
        weight = (per_token * behind[..., None]).masked_fill(~taken[..., None], -torch.inf).exp()
        keys = weight[..., None] * k[block].to(dtype).repeat_interleave(group, 2)
        values = torch.where(taken[..., None, None], v[block].to(dtype), 0)
        states += torch.einsum("cthk,cthv->chkv", torch.where(taken[..., None, None], keys, 0), values)
    pool[spans.slots] = states.to(pool.dtype)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    states: StateSlots,
    scale: float | None = None,
) -> Tensor:
    """One token of every sequence: update its slot in place and return (num_sequences, num_value_heads, value_dim).

    Shapes, dtypes and errors are those of `prefill`, with one token a sequence.
    """
    _require_inputs(q, k, v, log_decay)
    num_sequences, num_heads, value_dim = v.shape
    key_dim = k.shape[-1]
    states.require(num_sequences, (num_heads, key_dim, value_dim))
    dtype = torch.promote_types(v.dtype, torch.float32)
    group = num_heads // k.shape[1]
    query, key = (x.to(dtype).repeat_interleave(group, 1) for x in (q, k))
    decay = log_decay.to(dtype).exp()[:, None, None]
    updated = decay * states.read(dtype) + key[..., None] * v.to(dtype)[..., None, :]
    states.write(updated)
    outputs = (updated.mT @ query[..., None]).squeeze(-1) * (key_dim**-0.5 if scale is None else scale)
    return outputs.masked_fill(states.is_padding[:, None, None], 0).to(v.dtype)


def require_checkpoint(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    chunk_states: Tensor | None,
    initial_states: Tensor | None,
    spans: Spans,
    pool: Tensor,
) -> None:
    """Raise ValueError for arguments that `checkpoint` does not take."""
    _require_keys(k, v, log_decay)
    state_shape = (v.shape[1], k.shape[2], v.shape[2])
    for name, tensor in (("chunk_states", chunk_states), ("initial_states", initial_states), ("pool", pool)):
        if tensor is not None and (tuple(tensor.shape[1:]) != state_shape or not tensor.is_floating_point()):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}: "
                f"expected {(*tensor.shape[:1], *state_shape)} of a float dtype"
            )
    spans.require_tokens(k.shape[0])
    spans.require_chunk_states(chunk_states)
    if initial_states is not None:
        spans.require_sequences(initial_states.shape[0], "initial_states")
    spans.require_slots(pool)


def _require_inputs(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> None:
    _require_keys(k, v, log_decay)
    if q.shape != k.shape:
        raise ValueError(f"q has shape {tuple(q.shape)}: expected that of k, {tuple(k.shape)}")
    if q.dtype != v.dtype or k.dtype != v.dtype:
        raise ValueError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}: expected one dtype")


def _require_keys(k: Tensor, v: Tensor, log_decay: Tensor) -> None:
    if v.dim() != 3 or not v.is_floating_point():
        raise ValueError(
            f"v has shape {tuple(v.shape)} and dtype {v.dtype}: "
            "expected (num_tokens, num_value_heads, value_dim) of a float dtype"
        )
    fits = k.dim() == 3 and k.is_floating_point() and k.shape[0] == v.shape[0]
    if not fits or k.shape[1] == 0 or v.shape[1] % k.shape[1]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and dtype {k.dtype}: expected (num_tokens, num_key_heads, key_dim) of a "
            f"float dtype, with {v.shape[0]} tokens and a divisor of {v.shape[1]} heads"
        )
    if tuple(log_decay.shape) != (v.shape[1],) or not log_decay.is_floating_point():
        raise ValueError(
            f"log_decay has shape {tuple(log_decay.shape)} and dtype {log_decay.dtype}: "
            f"expected ({v.shape[1]},) of a float dtype"
        )
