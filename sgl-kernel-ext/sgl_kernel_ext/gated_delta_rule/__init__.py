"""The gated delta rule: a matrix state that forgets, corrects and is read by every token."""

from sgl_kernel_ext import launch
from sgl_kernel_ext.delta_rule import CHUNK_SIZE, Prefill
from sgl_kernel_ext.gated_delta_rule import reference
from sgl_kernel_ext.gated_delta_rule.reference import decode, prefill

__all__ = ["CHUNK_SIZE", "Prefill", "advance", "checkpoint", "decode", "prefill"]

checkpoint = launch.by_device(reference.checkpoint, f"{__name__}.kernel")
advance = launch.by_device(reference.advance, f"{__name__}.kernel")
