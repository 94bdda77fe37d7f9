"""Kimi delta attention: the gated delta rule with a decay for every channel of a key.

    per token  2 D (3 H d + H) + 2 (D r + r H d) 2 (low-rank decay and output gate) + 2 H d D (out) + 2 K 3 H d
               + 7 H d^2 (recurrence, as in `gated_delta`)
    state      H d^2 numbers, and a window of (K - 1) 3 H d

r is the rank of the decay's and gate's projections, the width d of a head; a gate of full rank takes 2 D H d in the
place of its half (Kimi K3). Source: arXiv 2510.26692, section 3; SGLang `KimiLinearStateShape.create`, `kimi_k3.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

from marconi.model.base import FlopCurve, Layer, Storage

_RECURRENCE_FLOPS = 7


@dataclass(frozen=True, slots=True)
class KimiDeltaAttention(Layer):
    """One KDA layer. Its heads are split over the workers."""

    kind: ClassVar[str] = "kda"

    hidden_size: int
    num_heads: int
    head_dim: int
    conv_kernel: int
    has_full_rank_gate: bool = False

    @property
    def num_parameters(self) -> int:
        """Queries, keys, values, write strength, decay, output gate, output, convolution."""
        channels = self.num_heads * self.head_dim
        low_rank = self.head_dim * (self.hidden_size + channels)
        gates = low_rank + (self.hidden_size * channels if self.has_full_rank_gate else low_rank)
        return self.hidden_size * (4 * channels + self.num_heads) + gates + 3 * channels * self.conv_kernel

    @property
    def flops(self) -> FlopCurve:
        """The same for every token."""
        return FlopCurve(linear=2 * self.num_parameters + _RECURRENCE_FLOPS * self.num_heads * self.head_dim**2)

    def recurrent_bytes(self, storage: Storage) -> int:
        """The d x d numbers of each of the worker's heads."""
        return storage.shard(self.num_heads, "the number of KDA heads") * self.head_dim**2 * storage.state_itemsize

    def convolution_bytes(self, storage: Storage) -> int:
        """The last K - 1 queries, keys and values of the worker's heads."""
        channels = storage.shard(self.num_heads, "the number of KDA heads") * self.head_dim
        return 3 * channels * (self.conv_kernel - 1) * storage.conv_itemsize
