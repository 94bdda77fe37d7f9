"""Linear attention with one constant decay a head, as Lightning Attention has it."""

from torch import Tensor

from sgl_kernel_ext import launch
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.simple_decay import reference
from sgl_kernel_ext.simple_decay.reference import CHUNK_SIZE, Prefill, decode, prefill

__all__ = ["CHUNK_SIZE", "Prefill", "checkpoint", "decode", "prefill"]


def checkpoint(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    chunk_states: Tensor | None,
    *,
    spans: Spans,
    pool: Tensor,
    initial_states: Tensor | None = None,
) -> None:
    """As `reference.checkpoint`; on an accelerator by the Triton kernel."""
    if launch.runs_kernels(pool):
        from sgl_kernel_ext.simple_decay.kernel import checkpoint as take
    else:
        take = reference.checkpoint
    take(k, v, log_decay, chunk_states, spans=spans, pool=pool, initial_states=initial_states)
