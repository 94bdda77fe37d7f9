"""Compile the kernels that a model needs before its first request.

Triton compiles a kernel when a launch brings new dtypes, or extents or strides that are 1 or multiples of 16 where they
were not. All of these are a model's and none is a batch's (`tile.py`), so one launch of each operator, as the model's
prefills make it, leaves nothing to compile while a request waits. Each launch here has one span, of no token, to a slot
that kernels skip: no state is read or written, and pools may be in use. Call this where kernels run, for each pool,
and for the drafts that a server verifies.

Operands are laid out as SGLang's prefills leave them: side by side, rows of tokens a multiple of 16 values apart,
decays and beta in float32, the slots of sequences in int32 and those of states in int64.
"""

import torch
from torch import Tensor

from sgl_kernel_ext import draft_ends, gated_delta_rule, kda, mamba2, short_conv, state_copy
from sgl_kernel_ext.checkpoints import NO_CHUNK, Spans
from sgl_kernel_ext.state_pool import StateSlots


def gated_delta_rule_checkpoint(pool: Tensor, *, num_key_heads: int, dtype: torch.dtype) -> None:
    """Compile `gated_delta_rule.checkpoint` for keys, values and chunk states of `dtype`."""
    _, num_heads, value_dim, key_dim = pool.shape
    k, values, chunk_states = (
        pool.new_empty(1, *shape, dtype=dtype)
        for shape in ((num_key_heads, key_dim), (num_heads, value_dim), pool.shape[1:])
    )
    sums = pool.new_empty(1, num_heads, dtype=torch.float32)
    gated_delta_rule.checkpoint(k, values, sums, chunk_states, spans=_nothing(pool), pool=pool)


def gated_delta_rule_advance(
    pool: Tensor, *, num_key_heads: int, dtype: torch.dtype, chunk_dtype: torch.dtype = torch.float32
) -> None:
    """Compile `gated_delta_rule.advance` for keys and values of `dtype` and chunk states of `chunk_dtype`.

    Initial states have the dtype of the pool. Where that is `chunk_dtype` one compilation serves batches with and
    without either, else three.
    """
    _, num_heads, value_dim, key_dim = pool.shape
    k, v = (pool.new_empty(1, *shape, dtype=dtype) for shape in ((num_key_heads, key_dim), (num_heads, value_dim)))
    g, beta = (pool.new_empty(1, num_heads, dtype=torch.float32) for _ in range(2))
    chunk_states = pool.new_empty(1, *pool.shape[1:], dtype=chunk_dtype)
    initial_states = pool.new_empty(1, *pool.shape[1:])
    for start in ((chunk_states, None), (chunk_states, initial_states), (None, initial_states)):
        gated_delta_rule.advance(k, v, g, beta, start[0], spans=_nothing(pool), pool=pool, initial_states=start[1])


def kda_checkpoint(pool: Tensor, *, num_key_heads: int, dtype: torch.dtype) -> None:
    """Compile `kda.checkpoint` for keys, values and chunk states of `dtype`, and snapshots in float32."""
    _, num_heads, value_dim, key_dim = pool.shape
    k, values, chunk_states = (
        pool.new_empty(1, *shape, dtype=dtype)
        for shape in ((num_key_heads, key_dim), (num_heads, value_dim), pool.shape[1:])
    )
    sums = pool.new_empty(1, num_heads, key_dim, dtype=torch.float32)
    snapshots = pool.new_empty(1, *pool.shape[1:], dtype=torch.float32)
    kda.checkpoint(k, values, sums, chunk_states, spans=_nothing(pool), pool=pool, log_base=2.0, snapshots=snapshots)


def mamba2_checkpoint(pool: Tensor, *, num_groups: int, chunk_size: int, dtype: torch.dtype) -> None:
    """Compile `mamba2.checkpoint` for x and B of `dtype`, and chunk states and initial states of the pool's."""
    _, num_heads, head_dim, state_dim = pool.shape
    delta, sums = (pool.new_empty(num_heads, 1, chunk_size, dtype=torch.float32) for _ in range(2))
    mamba2.checkpoint(
        pool.new_empty(1, num_heads, head_dim, dtype=dtype),
        delta,
        sums,
        pool.new_empty(1, num_groups, state_dim, dtype=dtype),
        pool.new_empty(1, *pool.shape[1:]),
        initial_states=None,
        chunk_size=chunk_size,
        spans=_nothing(pool),
        pool=pool,
    )


def short_conv_checkpoint(pool: Tensor, x: Tensor, *, always_continues: bool = False) -> None:
    """Compile `short_conv.checkpoint` for inputs with the dtype and strides of x (num_tokens, num_channels).

    With and without windows of `pool` to continue from, or from every sequence's slot, given in int64.
    """
    slots = torch.full((1,), -1, dtype=torch.int64 if always_continues else torch.int32, device=pool.device)
    states = StateSlots(pool, slots, torch.zeros(1, dtype=torch.bool, device=pool.device))
    for each in (StateSlots(pool, slots),) if always_continues else (states, None):
        short_conv.checkpoint(x, states=each, spans=_nothing(pool), pool=pool)


def state_copies(pool: Tensor, *, slot_dim: int = 0) -> None:
    """Compile `state_copy.copy` for `pool`."""
    slots = torch.full((1,), -1, device=pool.device)
    state_copy.copy(pool, slots, slots, slot_dim=slot_dim)


def find_draft_ends(tracking_slots: Tensor, *, max_depth: int) -> None:
    """Compile `draft_ends.find` for steps that accept up to `max_depth` nodes, as SGLang's verify steps give them."""
    short, long = (
        torch.zeros(max_depth, dtype=dtype, device=tracking_slots.device) for dtype in (torch.int32, torch.int64)
    )
    draft_ends.find(
        draft_ends.new(1, tracking_slots.device),
        tokens_out=short,
        accepted=short[None],
        num_accepted=short[:1],
        num_before=long[:1],
        num_nodes=max_depth,
        stop_tokens=long[None, :1],
        max_lengths=long[:1],
        by_host=short[:1].bool(),
        tracking_slots=tracking_slots,
        requests=long[:1],
        turns=long[:1] - 1,
    )


def _nothing(pool: Tensor) -> Spans:
    """One span of no token, to no slot."""
    zero = torch.zeros(1, dtype=torch.int64, device=pool.device)
    none = torch.full_like(zero, NO_CHUNK)
    return Spans(zero, none, zero, zero, none, max_tokens=0)
