"""The Mamba2 recurrence: a matrix state that decays, takes in and is read by every token."""

from torch import Tensor

from sgl_kernel_ext import launch
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.mamba2 import reference
from sgl_kernel_ext.mamba2.reference import Prefill, decode, prefill

__all__ = ["Prefill", "checkpoint", "decode", "prefill"]


def checkpoint(
    x: Tensor,
    delta: Tensor,
    decay_sums: Tensor,
    B: Tensor,
    chunk_states: Tensor,
    *,
    initial_states: Tensor | None,
    chunk_size: int,
    spans: Spans,
    pool: Tensor,
) -> None:
    """As `reference.checkpoint`; on an accelerator by the Triton kernel."""
    if launch.runs_kernels(pool):
        from sgl_kernel_ext.mamba2.kernel import checkpoint as take
    else:
        take = reference.checkpoint
    take(
        x,
        delta,
        decay_sums,
        B,
        chunk_states,
        initial_states=initial_states,
        chunk_size=chunk_size,
        spans=spans,
        pool=pool,
    )
