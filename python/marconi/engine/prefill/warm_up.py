"""Compiles the kernels of planned prefills and verified drafts before the first request.

Triton compiles a kernel at the first launch with new dtypes, extents or strides, and so does FlashInfer the variant of
its prefill that leaves states after chunks. Both would happen on the scheduler's thread while a request waits. The
model's pools determine all that they compile for:

    pool of states     (num_slots, num_heads, num_rows, num_columns)
    pool of windows    num_channels = num_heads * num_rows + 2 * num_key_heads * num_columns

so the key heads of a rank (Mamba2: its groups) follow. The operators are launched on the live pools and write to none
(`sgl_kernel_ext.warm_up`); FlashInfer prefills zeros, over states of their own. A failure is logged, and the server
continues without.

Owner: the process that runs the model.
"""

import logging
import time
from typing import Any, Final

import torch
from torch import Tensor

from marconi.engine.faults import fails_open
from marconi.engine.prefill.side_states import pools_beside
from marconi.engine.prefill.spans import FLA_CHUNK_SIZE, ChunkEnds, Family, family_of
from sgl_kernel_ext import warm_up
from sgl_kernel_ext.launch import runs_kernels

_CHUNKS_OF_KDA: Final = (1, 33, 129)
"""Numbers of chunks in the batches that are compiled for one by one.

Source: `sglang/kernels/ops/attention/fla/chunk_delta_h.py`, `NT_BUCKET`.
"""
_TURNED: Final = (16, 17)
"""Tokens of inputs that lie channel by channel."""

logger = logging.getLogger(__name__)


@fails_open
def warm_up_prefills(model_runner: Any) -> None:
    """Compile the kernels that states of `model_runner`'s prefills are taken by, where kernels run."""
    linear = model_runner.attn_backend.linear_attn_backend
    family = family_of(linear)
    pools = linear.req_to_token_pool.mamba_pool.mamba_cache
    if family is None or not runs_kernels(pools.temporal):
        return
    start_s = time.monotonic()
    states, windows, dtype = pools.temporal[0], pools.conv[0][0], model_runner.dtype
    # KDA keeps the window before the channels, of which there are more.
    windows = windows if windows.shape[1] > windows.shape[2] else windows.transpose(-1, -2)
    num_channels = row_stride = windows.shape[1]
    if family is Family.SHORT_CONVOLUTION:
        # LFM2 turns its inputs, so the number of tokens is a stride; whether it is aligned is compiled for.
        for num_tokens in _TURNED:
            warm_up.short_conv_checkpoint(windows, windows.new_empty(num_channels, num_tokens, dtype=dtype).T)
        for pool in pools.conv:
            warm_up.short_conv_checkpoint(pool[0], pool.new_empty(1, pool.shape[2], dtype=dtype))
    else:
        _warm_up_states(family, linear, states, num_key_heads(windows, states), dtype)
        if family is Family.MAMBA2:
            # Inputs lie between the gate and the steps, in the rows of one projection.
            row_stride += states.shape[1] * (states.shape[2] + 1)
        inputs = windows.new_empty(1, row_stride, dtype=dtype)[:, :num_channels]
        warm_up.short_conv_checkpoint(windows, inputs)
        for pool in (*pools.conv, pools.temporal):
            warm_up.state_copies(pool, slot_dim=1)
    for beside, _ in pools_beside(linear.req_to_token_pool):
        if beside.is_floating_point():
            inputs = beside.new_empty(1, beside.shape[2], dtype=dtype)
            warm_up.short_conv_checkpoint(beside[0], inputs, always_continues=True)
    logger.info("marconi: what keeps states of a prefill was compiled in %.1f s", time.monotonic() - start_s)


@fails_open
def warm_up_drafts(requests: Any, max_depth: int) -> None:
    """Compile what finds the ends in steps that accept up to `max_depth` nodes of each of `requests`, SGLang's pool."""
    tracking_slots = requests.req_index_to_mamba_ping_pong_track_buffer_mapping
    if runs_kernels(tracking_slots):
        warm_up.find_draft_ends(tracking_slots, max_depth=max_depth)


def num_key_heads(windows: Tensor, states: Tensor) -> int:
    """The heads of keys, or Mamba2's groups, that the pools of a layer on this rank have room for.

    windows (num_slots, num_channels, width - 1); states (num_slots, num_heads, num_rows, num_columns).
    """
    _, num_heads, num_rows, num_columns = states.shape
    return int(windows.shape[1] - num_heads * num_rows) // (2 * num_columns)


def _warm_up_states(family: Family, linear: Any, pool: Tensor, num_key_heads: int, dtype: torch.dtype) -> None:
    """Compile what writes the states of a layer, `pool`, from inputs of `dtype`."""
    if family is Family.MAMBA2:
        warm_up.mamba2_checkpoint(pool, num_groups=num_key_heads, chunk_size=linear.mamba_chunk_size, dtype=dtype)
    elif family is Family.KDA:
        warm_up.kda_checkpoint(pool, num_key_heads=num_key_heads, dtype=dtype)
        _copy_by_kda(pool, num_key_heads, dtype)
    elif family is Family.GATED_DELTA_RULE:
        warm_up.gated_delta_rule_checkpoint(pool, num_key_heads=num_key_heads, dtype=dtype)
    else:
        rows = _rows_of_flashinfer(linear.kernel_dispatcher.extend_kernel, pool, num_key_heads, dtype)
        warm_up.gated_delta_rule_advance(pool, num_key_heads=num_key_heads, dtype=dtype, chunk_dtype=rows.dtype)


def _copy_by_kda(pool: Tensor, num_key_heads: int, dtype: torch.dtype) -> None:
    """Compile the variants of KDA's chunk kernel that copy chunk states: a token of a sequence without a slot."""
    from sglang.kernels.ops.attention.fla.chunk_delta_h import chunk_gated_delta_rule_fwd_h

    _, num_heads, value_dim, key_dim = pool.shape
    w, u, sums = (pool.new_zeros(1, 1, num_heads, dim) for dim in (key_dim, value_dim, key_dim))
    none = torch.full((1,), -1, dtype=torch.int32, device=pool.device)
    bounds = torch.zeros(2, dtype=torch.int32, device=pool.device)
    bounds[1:].fill_(1)
    for num_chunks in _CHUNKS_OF_KDA:
        chunk_gated_delta_rule_fwd_h(
            k=pool.new_zeros(1, 1, num_key_heads, key_dim, dtype=dtype),
            w=w.to(dtype),
            u=u.to(dtype),
            gk=sums.float(),
            initial_state=pool,
            initial_state_indices=none,
            cu_seqlens=bounds,
            chunk_indices=torch.empty(num_chunks, 2, dtype=torch.int32, device=pool.device),
            use_exp2=True,
            track_state=pool.new_empty(1, *pool.shape[1:], dtype=torch.float32),
            track_chunk_idx=none,
        )


def _rows_of_flashinfer(kernel: Any, pool: Tensor, num_key_heads: int, dtype: torch.dtype) -> Tensor:
    """Prefill a chunk and a token, and return the row that FlashInfer leaves: (1, 1, num_heads, value_dim, key_dim)."""
    _, num_heads, value_dim, key_dim = pool.shape
    num_tokens = FLA_CHUNK_SIZE + 1
    ends = ChunkEnds.of([num_tokens], FLA_CHUNK_SIZE, pool.device)
    q, k = (pool.new_zeros(1, num_tokens, num_key_heads, key_dim, dtype=dtype) for _ in range(2))
    g, beta = (pool.new_zeros(1, num_tokens, num_heads, dtype=torch.float32) for _ in range(2))
    query_start_loc = pool.new_zeros(2, dtype=torch.int32)
    query_start_loc[1:].fill_(num_tokens)
    rows: Tensor = kernel.extend(
        q,
        k,
        pool.new_zeros(1, num_tokens, num_heads, value_dim, dtype=dtype),
        g,
        beta,
        ssm_states=pool.new_zeros(1, *pool.shape[1:]),
        cache_indices=pool.new_zeros(1, dtype=torch.int32),
        query_start_loc=query_start_loc,
        state_checkpoint_cu_starts=ends.before,
        num_state_checkpoints=ends.num,
        state_checkpoint_every_n_tokens=ends.every,
    )[2]
    return rows
