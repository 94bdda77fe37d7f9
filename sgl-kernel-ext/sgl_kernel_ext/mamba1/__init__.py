"""The Mamba1 recurrence, or selective scan: every channel keeps a vector of its own decays."""

from torch import Tensor

from sgl_kernel_ext import launch
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.mamba1 import reference
from sgl_kernel_ext.mamba1.reference import Prefill, decode, prefill

__all__ = ["Prefill", "checkpoint", "decode", "prefill"]


def checkpoint(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, *, initial_states: Tensor | None, spans: Spans, pool: Tensor
) -> None:
    """As `reference.checkpoint`; on an accelerator by the Triton kernel."""
    if launch.runs_kernels(pool):
        from sgl_kernel_ext.mamba1.kernel import checkpoint as take
    else:
        take = reference.checkpoint
    take(x, delta, A, B, initial_states=initial_states, spans=spans, pool=pool)
