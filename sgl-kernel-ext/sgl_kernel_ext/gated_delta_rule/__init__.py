"""The gated delta rule: a matrix state that forgets, corrects and is read by every token."""

from torch import Tensor

from sgl_kernel_ext import launch
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.gated_delta_rule import reference
from sgl_kernel_ext.gated_delta_rule.reference import CHUNK_SIZE, Prefill, decode, prefill

__all__ = ["CHUNK_SIZE", "Prefill", "advance", "checkpoint", "decode", "prefill"]


def checkpoint(
    k: Tensor, corrected_values: Tensor, decay_sums: Tensor, chunk_states: Tensor, *, spans: Spans, pool: Tensor
) -> None:
    """As `reference.checkpoint`; on an accelerator by the Triton kernel."""
    if launch.runs_kernels(pool):
        from sgl_kernel_ext.gated_delta_rule.kernel import checkpoint as take
    else:
        take = reference.checkpoint
    take(k, corrected_values, decay_sums, chunk_states, spans=spans, pool=pool)


def advance(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_states: Tensor | None,
    *,
    spans: Spans,
    pool: Tensor,
    initial_states: Tensor | None = None,
) -> None:
    """As `reference.advance`; on an accelerator by the Triton kernel."""
    if launch.runs_kernels(pool):
        from sgl_kernel_ext.gated_delta_rule.kernel import advance as walk
    else:
        walk = reference.advance
    walk(k, v, g, beta, chunk_states, spans=spans, pool=pool, initial_states=initial_states)
