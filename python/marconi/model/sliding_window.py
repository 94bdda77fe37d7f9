"""Softmax attention that sees the last W tokens only.

    FLOPs(L) = projections as in `attention` + 2 H (dk + dv) S_W(L),  S_W(L) = sum over t of min(t, W)
    window bytes(L) = min(L, W) Hkv (dk + dv) b

KV of older tokens is of no use to anyone, so a layer like this adds nothing to the KV that a prefix keeps for all its
tokens; a checkpoint is usable only together with the KV of the W tokens before it.
"""

from dataclasses import dataclass
from typing import ClassVar

from marconi.model.attention import Attention
from marconi.model.base import FlopCurve, Layer, Storage


@dataclass(frozen=True, slots=True)
class SlidingWindowAttention(Layer):
    """Causal attention over a window of `window_tokens` tokens, the query's own included."""

    kind: ClassVar[str] = "sliding window"

    attention: Attention
    window_tokens: int

    @property
    def num_parameters(self) -> int:
        """Shard like full attention."""
        return self.attention.num_parameters

    @property
    def flops(self) -> FlopCurve:
        """Projections and the band of scores."""
        return FlopCurve(linear=2 * self.num_parameters, windows=((self.window_tokens, self.attention.flops_per_key),))

    def window(self, storage: Storage) -> tuple[int, int]:
        """The window, and the KV bytes of one of its tokens."""
        return (self.window_tokens, self.attention.kv_bytes_per_token(storage))
