"""SGLang's copies of states that decoding leaves: to slots of the prefix cache, and after accepted drafts.

Upstream: `sglang/kernels/ops/mamba/mamba_state_scatter_triton.py`. Tracked states are copied by
`sgl_kernel_ext.state_copy`, where their row's mask is set.
"""

from typing import Any

import torch
from torch import Tensor

from sgl_kernel_ext import state_copy


def track_mamba_states_if_needed(
    conv_states: Tensor,
    ssm_states: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy in the pools of one layer, (num_slots, ...).

    Not read: `check_freed_slots` asks for a check of negative slots that is always made.
    """
    sources, destinations = _slots(cache_indices, mamba_track_mask, mamba_track_indices, batch_size)
    for pool in (conv_states, ssm_states):
        state_copy.copy(pool, sources, destinations)


def track_mamba_states_all_layers(
    conv_states_pool: Tensor,
    ssm_states_pool: Tensor,
    cache_indices: Tensor,
    mamba_track_mask: Tensor,
    mamba_track_indices: Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy in the pools of all layers, (num_layers, num_slots, ...); `check_freed_slots` as above."""
    sources, destinations = _slots(cache_indices, mamba_track_mask, mamba_track_indices, batch_size)
    for pool in (conv_states_pool, ssm_states_pool):
        state_copy.copy(pool, sources, destinations, slot_dim=1)


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: Any,
    state_indices_tensor: Tensor,
    last_correct_step_indices: Tensor,
    mamba_track_indices: Tensor | None,
    mamba_steps_to_track: Tensor | None,
    src_indices_raw: Tensor | None = None,
) -> None:
    """Copy the state after each request's last accepted draft to its slot, and those on SGLang's grid to theirs.

    `mamba_caches` holds the pools of all layers (num_layers, num_slots, ...), and the states after drafts (num_layers,
    num_rows, num_nodes, ...), from rows `src_indices_raw` or the batch's. Nothing is copied where a step is negative.
    """
    copies = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        copies.append((mamba_track_indices, mamba_steps_to_track))
    kept = (mamba_caches.intermediate_ssm, *mamba_caches.intermediate_conv_window)
    for slots, steps in copies:
        rows = torch.arange(len(steps)) if src_indices_raw is None else src_indices_raw
        is_copied = (steps >= 0) & (slots >= 0)
        row, step, slot = (each[is_copied].long() for each in (rows, steps, slots))
        for pool, states in zip((mamba_caches.temporal, *mamba_caches.conv), kept, strict=True):
            pool[:, slot] = states[:, row, step].to(pool.dtype)


def _slots(cache_indices: Tensor, mask: Tensor, track_indices: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    sources = torch.where(mask[:batch_size].bool(), cache_indices[:batch_size], -1)
    return sources, track_indices[:batch_size]
