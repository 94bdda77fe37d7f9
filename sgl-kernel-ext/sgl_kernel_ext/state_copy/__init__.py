"""Copies of states between the slots of a pool, and slots set to zero."""

from torch import Tensor

from sgl_kernel_ext import launch
from sgl_kernel_ext.state_copy import reference

__all__ = ["clear", "copy"]


def copy(pool: Tensor, source_slots: Tensor, destination_slots: Tensor, *, slot_dim: int = 0) -> None:
    """As `reference.copy`; on an accelerator by the Triton kernel, where no slot may be both source and destination."""
    if launch.runs_kernels(pool):
        from sgl_kernel_ext.state_copy.kernel import copy as run
    else:
        run = reference.copy
    run(pool, source_slots, destination_slots, slot_dim=slot_dim)


def clear(pool: Tensor, slots: Tensor, *, slot_dim: int = 0) -> None:
    """As `reference.clear`; on an accelerator by the Triton kernel."""
    if launch.runs_kernels(pool):
        from sgl_kernel_ext.state_copy.kernel import clear as run
    else:
        run = reference.clear
    run(pool, slots, slot_dim=slot_dim)
