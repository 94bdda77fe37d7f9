"""Softmax attention with shared or own key-value heads (MHA, GQA, MQA), over all tokens or a sliding window.

    FLOPs(L) = 2 L D (H dk (1 + gate) + Hkv (dk + dv)) + 2 L H dv D + 2 H (dk + dv) L (L + 1) / 2
    KV bytes a token = Hkv (dk + dv) b

D hidden width, H query heads, Hkv key-value heads, dk and dv widths of a head, b bytes of a number. With D = H dk =
Hkv dv and no gate the projections cost 8 L D^2, as in the Marconi paper's appendix.
Heads are split over the workers; key-value heads fewer than workers are replicated (SGLang `get_num_kv_heads`).
"""

from dataclasses import dataclass
from typing import ClassVar

from marconi.model.base import FlopCurve, Layer, Storage, causal


@dataclass(frozen=True, slots=True)
class Attention(Layer):
    """Full causal attention."""

    kind: ClassVar[str] = "attention"

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    gate_channels: int = 0
    """Width of a projected output gate; 0 for none."""

    @property
    def num_parameters(self) -> int:
        """Query, gate, key, value and output projections."""
        queries = self.num_heads * self.head_dim + self.gate_channels
        keys_and_values = self.num_kv_heads * (self.head_dim + self.v_head_dim)
        return self.hidden_size * (queries + keys_and_values + self.num_heads * self.v_head_dim)

    @property
    def flops_per_key(self) -> int:
        """Score and weighted value of one (query, key) pair, all heads."""
        return 2 * self.num_heads * (self.head_dim + self.v_head_dim)

    @property
    def flops(self) -> FlopCurve:
        """Projections and the causal triangle of scores."""
        return causal(2 * self.num_parameters, self.flops_per_key)

    def kv_bytes_per_token(self, storage: Storage) -> int:
        """Keys and values of the worker's heads."""
        storage.shard(self.num_heads, "the number of attention heads")
        num_kv_heads = storage.shard_or_replicate(self.num_kv_heads, "the number of key-value heads")
        return num_kv_heads * (self.head_dim + self.v_head_dim) * storage.kv_itemsize


@dataclass(frozen=True, slots=True)
class SlidingWindowAttention(Layer):
    """Attention that sees the last W = `window_tokens` tokens only, the query's own included.

        FLOPs(L) = projections as of `Attention` + 2 H (dk + dv) S_W(L),  S_W(L) = sum over t of min(t, W)
        window bytes(L) = min(L, W) Hkv (dk + dv) b

    Nothing reads KV of older tokens, so such a layer adds nothing to the KV that a prefix keeps for all its tokens; a
    checkpoint is usable only together with the KV of the W tokens before it.
    """

    kind: ClassVar[str] = "sliding window"

    attention: Attention
    window_tokens: int

    @property
    def num_parameters(self) -> int:
        """The projections of `attention`."""
        return self.attention.num_parameters

    @property
    def flops(self) -> FlopCurve:
        """Projections and the band of scores."""
        return FlopCurve(linear=2 * self.num_parameters, windows=((self.window_tokens, self.attention.flops_per_key),))

    def window(self, storage: Storage) -> tuple[int, int]:
        """The window, and the KV bytes of one of its tokens."""
        return (self.window_tokens, self.attention.kv_bytes_per_token(storage))
