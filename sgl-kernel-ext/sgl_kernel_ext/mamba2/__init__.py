"""The Mamba2 recurrence: a matrix state that decays, takes in and is read by every token."""

from sgl_kernel_ext import launch
from sgl_kernel_ext.mamba2 import reference
from sgl_kernel_ext.mamba2.reference import Prefill, decode, prefill

__all__ = ["Prefill", "checkpoint", "decode", "prefill"]

checkpoint = launch.by_device(reference.checkpoint, f"{__name__}.kernel")
