"""Copies of states between the slots of a pool."""

from sgl_kernel_ext import launch
from sgl_kernel_ext.state_copy import reference

__all__ = ["copy"]

copy = launch.by_device(reference.copy, f"{__name__}.kernel")
