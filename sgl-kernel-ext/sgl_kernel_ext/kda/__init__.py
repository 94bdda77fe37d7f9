"""Kimi Delta Attention: the gated delta rule with a decay of its own for every key channel."""

from sgl_kernel_ext import launch
from sgl_kernel_ext.delta_rule import CHUNK_SIZE, Prefill
from sgl_kernel_ext.kda import reference
from sgl_kernel_ext.kda.reference import decode, prefill

__all__ = ["CHUNK_SIZE", "Prefill", "checkpoint", "decode", "prefill"]

checkpoint = launch.by_device(reference.checkpoint, f"{__name__}.kernel")
