"""Mamba-2: heads with a state of P x N numbers and one decay each; B and C are shared by the heads of a group.

    per token  2 D (2 H P + 2 G N + H) + 2 H P D (in, out) + 2 K (H P + 2 G N) (convolution) + 5 H P N (recurrence)
    state      H P N numbers, and a window of (K - 1) (H P + 2 G N)

The recurrence's 5 a number of the state: decay (1), write (2), read (2). Kernels compute it in chunks and spend more
FLOPs, depending on the chunk, for fewer memory accesses; a device's FLOP rate is of these FLOPs, not of theirs.
Groups fewer than workers are replicated. Source: arXiv 2405.21060, section 7; SGLang `Mamba2StateShape.create`.
"""

from dataclasses import dataclass
from typing import ClassVar

from marconi.model.base import FlopCurve, Layer, Storage

_RECURRENCE_FLOPS = 5


@dataclass(frozen=True, slots=True)
class Mamba2(Layer):
    """One Mamba-2 layer. Its heads are split over the workers."""

    kind: ClassVar[str] = "mamba2"

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int

    @property
    def _inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Projections and convolution."""
        conv_channels = self._inner_size + 2 * self.num_groups * self.state_size
        into = self.hidden_size * (self._inner_size + conv_channels + self.num_heads)
        return into + self.hidden_size * self._inner_size + conv_channels * self.conv_kernel

    @property
    def flops(self) -> FlopCurve:
        """The same for every token."""
        return FlopCurve(linear=2 * self.num_parameters + _RECURRENCE_FLOPS * self._inner_size * self.state_size)

    def recurrent_bytes(self, storage: Storage) -> int:
        """P x N numbers for each of the worker's heads."""
        num_heads = storage.shard(self.num_heads, "the number of Mamba heads")
        return num_heads * self.head_dim * self.state_size * storage.state_itemsize

    def convolution_bytes(self, storage: Storage) -> int:
        """The last K - 1 inputs of the worker's channels and of its groups' B and C."""
        channels = storage.shard(self.num_heads, "the number of Mamba heads") * self.head_dim
        num_groups = storage.shard_or_replicate(self.num_groups, "the number of Mamba groups")
        return (channels + 2 * num_groups * self.state_size) * (self.conv_kernel - 1) * storage.conv_itemsize
