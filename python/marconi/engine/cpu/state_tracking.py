"""SGLang's copies of decode states into the slots of the prefix cache, on `sgl_kernel_ext.state_copy`.

Upstream: `sglang/kernels/ops/mamba/mamba_state_scatter_triton.py`. A row is copied where its mask is set.
"""

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


def _slots(cache_indices: Tensor, mask: Tensor, track_indices: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    sources = torch.where(mask[:batch_size].bool(), cache_indices[:batch_size], -1)
    return sources, track_indices[:batch_size]
