"""Copies of states between the slots of a pool, and slots set to zero."""

from sgl_kernel_ext import launch
from sgl_kernel_ext.state_copy import reference

__all__ = ["clear", "copy"]

copy = launch.by_device(reference.copy, f"{__name__}.kernel")
clear = launch.by_device(reference.clear, f"{__name__}.kernel")
