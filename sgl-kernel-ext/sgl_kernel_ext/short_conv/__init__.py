"""The short causal convolution in front of a recurrent layer."""

from torch import Tensor

from sgl_kernel_ext import launch
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.short_conv import reference
from sgl_kernel_ext.short_conv.reference import Activation, decode, prefill
from sgl_kernel_ext.state_pool import StateSlots

__all__ = ["Activation", "checkpoint", "decode", "prefill"]


def checkpoint(x: Tensor, *, states: StateSlots | None, spans: Spans, pool: Tensor) -> None:
    """As `reference.checkpoint`; on an accelerator by the Triton kernel."""
    if launch.runs_kernels(pool):
        from sgl_kernel_ext.short_conv.kernel import checkpoint as take
    else:
        take = reference.checkpoint
    take(x, states=states, spans=spans, pool=pool)
