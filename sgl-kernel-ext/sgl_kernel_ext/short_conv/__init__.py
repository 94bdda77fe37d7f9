"""The short causal convolution in front of a recurrent layer."""

from sgl_kernel_ext.short_conv.reference import Activation, decode, prefill

__all__ = ["Activation", "decode", "prefill"]
