"""RWKV-7: the generalised delta rule, with token shift in the place of a convolution.

    per token  4 x 2 D^2 (receptance, key, value, output) + 2 x 2 D (rw + ra + rv + rg) (low-rank decay, learning
               rate, value mix and gate) + 9 D d (recurrence)
    state      D d numbers, and the last input of the time mixing and of the channel mixing, 2 D

The recurrence's 9 a number of the state: decay (1), recall (2), remove (2), write (2), read (2). The channel mixing's
matrices are an `Mlp` without gate. Source: arXiv 2503.14456, section 3.
"""

from dataclasses import dataclass
from typing import ClassVar

from marconi.model.base import FlopCurve, Layer, Storage

_RECURRENCE_FLOPS = 9


@dataclass(frozen=True, slots=True)
class Rwkv7(Layer):
    """The time mixing of one RWKV-7 block, and the token shift of both mixings. Heads are split over the workers."""

    kind: ClassVar[str] = "rwkv7"

    hidden_size: int
    head_dim: int
    total_low_rank: int
    """Sum of the ranks of the decay, learning rate, value mix and gate projections."""

    @property
    def num_parameters(self) -> int:
        """Four square projections and the low-rank ones."""
        return 4 * self.hidden_size**2 + 2 * self.hidden_size * self.total_low_rank

    @property
    def flops(self) -> FlopCurve:
        """The same for every token."""
        return FlopCurve(linear=2 * self.num_parameters + _RECURRENCE_FLOPS * self.hidden_size * self.head_dim)

    def recurrent_bytes(self, storage: Storage) -> int:
        """The d x d numbers of each of the worker's heads."""
        num_heads = storage.shard(self.hidden_size // self.head_dim, "the number of RWKV heads")
        return num_heads * self.head_dim**2 * storage.state_itemsize

    def convolution_bytes(self, storage: Storage) -> int:
        """The last token's inputs of both mixings, which every worker needs whole."""
        return 2 * self.hidden_size * storage.conv_itemsize
