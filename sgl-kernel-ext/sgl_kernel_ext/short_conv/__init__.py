"""The short causal convolution in front of a recurrent layer."""

from sgl_kernel_ext import launch
from sgl_kernel_ext.short_conv import reference
from sgl_kernel_ext.short_conv.reference import Activation, decode, prefill

__all__ = ["Activation", "checkpoint", "decode", "prefill"]

checkpoint = launch.by_device(reference.checkpoint, f"{__name__}.kernel")
