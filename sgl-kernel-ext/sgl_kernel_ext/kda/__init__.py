"""Kimi Delta Attention: the gated delta rule with a decay of its own for every key channel."""

import math

from torch import Tensor

from sgl_kernel_ext import launch
from sgl_kernel_ext.checkpoints import Spans
from sgl_kernel_ext.kda import reference
from sgl_kernel_ext.kda.reference import CHUNK_SIZE, Prefill, decode, prefill

__all__ = ["CHUNK_SIZE", "Prefill", "checkpoint", "decode", "prefill"]


def checkpoint(
    k: Tensor,
    corrected_values: Tensor,
    decay_sums: Tensor,
    chunk_states: Tensor,
    *,
    spans: Spans,
    pool: Tensor,
    log_base: float = math.e,
) -> None:
    """As `reference.checkpoint`; on an accelerator by the Triton kernel."""
    if launch.runs_kernels(pool):
        from sgl_kernel_ext.kda.kernel import checkpoint as take
    else:
        take = reference.checkpoint
    take(k, corrected_values, decay_sums, chunk_states, spans=spans, pool=pool, log_base=log_base)
