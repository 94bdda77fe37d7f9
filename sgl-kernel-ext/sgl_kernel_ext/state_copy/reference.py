"""Copies between the slots of a state pool, in torch.

Every source is read before any destination is written, so a slot may be both: its old state goes out, a new one comes
in. Destinations are distinct.
"""

import torch
from torch import Tensor

_INTEGER_DTYPES = (torch.int32, torch.int64)


def copy(pool: Tensor, source_slots: Tensor, destination_slots: Tensor, *, slot_dim: int = 0) -> None:
    """Copy slot source_slots[i] of `pool` to slot destination_slots[i], in place; nothing where either is negative.

    pool has any shape, dtype and strides, with its slots along `slot_dim`: 0 for the pool of one layer, 1 for the pools
    of all layers (num_layers, num_slots, *state_shape). The slots are (num_copies,) int32 or int64. Raises ValueError
    for other shapes and dtypes.
    """
    if not 0 <= slot_dim < pool.dim():
        raise ValueError(f"slot_dim is {slot_dim}: expected a dimension of pool, which has shape {tuple(pool.shape)}")
    for name, slots in (("source_slots", source_slots), ("destination_slots", destination_slots)):
        if slots.dim() != 1 or slots.shape != source_slots.shape or slots.dtype not in _INTEGER_DTYPES:
            raise ValueError(
                f"{name} has shape {tuple(slots.shape)} and dtype {slots.dtype}: "
                f"expected ({source_slots.numel()},) of int32 or int64"
            )
    copied = (source_slots >= 0) & (destination_slots >= 0)
    by_slot = pool.movedim(slot_dim, 0)
    by_slot[destination_slots[copied].long()] = by_slot[source_slots[copied].long()]
