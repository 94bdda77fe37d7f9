"""Copies between the slots of a state pool in torch.

Every source is read before any destination is written, so a slot may be both: its old state goes out, a new one comes
in. That holds here alone; a kernel writes while it reads. Destinations are distinct.
"""

from torch import Tensor

from sgl_kernel_ext.arguments import INTEGERS, require


def copy(pool: Tensor, source_slots: Tensor, destination_slots: Tensor, *, slot_dim: int = 0) -> None:
    """Copy slot source_slots[i] of `pool` to slot destination_slots[i], in place; nothing where either is negative.

    pool has any shape, dtype and strides, with its slots along `slot_dim`: 0 for the pool of one layer, 1 for the pools
    of all layers (num_layers, num_slots, *state_shape). The slots are (num_copies,) int32 or int64. Raises ValueError
    for other shapes and dtypes and for a slot outside the pool.
    """
    require_copy(pool, source_slots, destination_slots, slot_dim)
    copied = (source_slots >= 0) & (destination_slots >= 0)
    by_slot = pool.movedim(slot_dim, 0)
    by_slot[destination_slots[copied].long()] = by_slot[source_slots[copied].long()]


def require_copy(pool: Tensor, source_slots: Tensor, destination_slots: Tensor, slot_dim: int) -> None:
    """Raise ValueError for arguments that `copy` does not take."""
    if not 0 <= slot_dim < pool.dim():
        raise ValueError(f"slot_dim must be 0 to {pool.dim() - 1}, a dimension of pool, got {slot_dim}")
    last = pool.shape[slot_dim] - 1
    for name, slots in (("source_slots", source_slots), ("destination_slots", destination_slots)):
        require(name, slots, (source_slots.numel(),), dtypes=INTEGERS)
        # On a device reading them would wait; a kernel leaves out what lies outside the pool.
        if slots.device.type == "cpu" and slots.numel() and int(slots.max()) > last:
            raise ValueError(f"a slot of {name} must be at most {last}, inside the pool, got {int(slots.max())}")
