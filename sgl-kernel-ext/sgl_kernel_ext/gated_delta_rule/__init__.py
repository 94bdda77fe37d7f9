"""The gated delta rule: a matrix state that forgets, corrects and is read by every token."""

from sgl_kernel_ext.gated_delta_rule.reference import CHUNK_SIZE, Prefill, decode, prefill

__all__ = ["CHUNK_SIZE", "Prefill", "decode", "prefill"]
