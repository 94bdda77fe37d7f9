"""Linear attention with a fixed decay a head (lightning attention, simple gated linear attention).

    per token  2 D (3 H d + gate) + 2 H d D + 5 H d^2 (decay 1, write 2, read 2)
    state      H d^2 numbers; there is no convolution

Source: arXiv 2401.04658; SGLang `configs/bailing_hybrid.py` and `configs/minicpm.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

from marconi.model.base import FlopCurve, Layer, Storage

_RECURRENCE_FLOPS = 5


@dataclass(frozen=True, slots=True)
class LightningAttention(Layer):
    """One layer of linear attention with simple decay. Its heads are split over the workers."""

    kind: ClassVar[str] = "lightning"

    hidden_size: int
    num_heads: int
    head_dim: int
    gate_channels: int = 0
    """Width of a projected output gate; 0 for none."""

    @property
    def num_parameters(self) -> int:
        """Queries, keys, values, gate and output."""
        return self.hidden_size * (4 * self.num_heads * self.head_dim + self.gate_channels)

    @property
    def flops(self) -> FlopCurve:
        """The same for every token."""
        return FlopCurve(linear=2 * self.num_parameters + _RECURRENCE_FLOPS * self.num_heads * self.head_dim**2)

    def recurrent_bytes(self, storage: Storage) -> int:
        """The d x d numbers of each of the worker's heads."""
        num_heads = storage.shard(self.num_heads, "the number of linear attention heads")
        return num_heads * self.head_dim**2 * storage.state_itemsize
