"""The gated delta rule (Gated DeltaNet): a value head has a state of dk x dv numbers, a decay and a write strength.

    per token  2 D (2 Hk dk + 2 Hv dv + 2 Hv) + 2 Hv dv D (in, out) + 2 K (2 Hk dk + Hv dv) (convolution)
               + 7 Hv dk dv (recurrence)
    state      Hv dk dv numbers, and a window of (K - 1) (2 Hk dk + Hv dv)

The recurrence's 7 a number of the state: decay (1), recall what the key holds (2), correct it (2), read with the
query (2). Chunked kernels spend more (see `mamba2`). Source: arXiv 2412.06464, section 3; SGLang
`configs/qwen3_next.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

from marconi.model.base import FlopCurve, Layer, Storage

_RECURRENCE_FLOPS = 7


@dataclass(frozen=True, slots=True)
class GatedDeltaRule(Layer):
    """One Gated DeltaNet layer. Its heads are split over the workers."""

    kind: ClassVar[str] = "gated delta rule"

    hidden_size: int
    num_key_heads: int
    key_head_dim: int
    num_value_heads: int
    value_head_dim: int
    conv_kernel: int

    @property
    def num_parameters(self) -> int:
        """Queries, keys, values, output gate, decay, write strength, output, convolution."""
        keys = self.num_key_heads * self.key_head_dim
        values = self.num_value_heads * self.value_head_dim
        into = self.hidden_size * (2 * keys + 2 * values + 2 * self.num_value_heads)
        return into + self.hidden_size * values + (2 * keys + values) * self.conv_kernel

    @property
    def flops(self) -> FlopCurve:
        """The same for every token."""
        state_numbers = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return FlopCurve(linear=2 * self.num_parameters + _RECURRENCE_FLOPS * state_numbers)

    def recurrent_bytes(self, storage: Storage) -> int:
        """The dk x dv numbers of each of the worker's value heads."""
        num_heads = storage.shard(self.num_value_heads, "the number of value heads")
        return num_heads * self.key_head_dim * self.value_head_dim * storage.state_itemsize

    def convolution_bytes(self, storage: Storage) -> int:
        """The last K - 1 queries, keys and values of the worker's heads."""
        values = storage.shard(self.num_value_heads, "the number of value heads") * self.value_head_dim
        keys = storage.shard_or_replicate(self.num_key_heads, "the number of key heads") * self.key_head_dim
        return (2 * keys + values) * (self.conv_kernel - 1) * storage.conv_itemsize
