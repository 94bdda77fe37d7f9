"""Mamba: a selective state space with a state of N numbers for each of its I inner channels.

    per token  2 D 2I + 2 I D (in, out) + 2 I (R + 2N) + 2 R I (step and B, C) + 2 K I (convolution) + 8 I N (scan)
    state      I N numbers, and a window of (K - 1) I

The scan's 8 a number of the state: dt A and exp (2), dt B (1), decay, write with x, add (3), read with C (2). With
I = 2 D the projections are 12 L D^2 and the scan 16 L D N, the two terms that the Marconi paper counts.
Source: arXiv 2312.00752, section 3; SGLang `Mamba2StateShape.create_full_rank`.
"""

from dataclasses import dataclass
from typing import ClassVar

from marconi.model.base import FlopCurve, Layer, Storage

_SCAN_FLOPS = 8


@dataclass(frozen=True, slots=True)
class Mamba1(Layer):
    """One Mamba layer. Its inner channels are split over the workers."""

    kind: ClassVar[str] = "mamba1"

    hidden_size: int
    inner_size: int
    state_size: int
    step_rank: int
    conv_kernel: int

    @property
    def num_parameters(self) -> int:
        """Projections, convolution, and the decay of every number of the state."""
        projections = 3 * self.hidden_size * self.inner_size
        selection = self.inner_size * (2 * self.step_rank + 2 * self.state_size)
        return projections + selection + self.inner_size * (self.conv_kernel + self.state_size)

    @property
    def flops(self) -> FlopCurve:
        """The same for every token."""
        matrices = self.num_parameters - self.inner_size * self.state_size
        return FlopCurve(linear=2 * matrices + _SCAN_FLOPS * self.inner_size * self.state_size)

    def recurrent_bytes(self, storage: Storage) -> int:
        """N numbers for each of the worker's channels."""
        return storage.shard(self.inner_size, "the inner width") * self.state_size * storage.state_itemsize

    def convolution_bytes(self, storage: Storage) -> int:
        """The last K - 1 inputs of each of them."""
        return storage.shard(self.inner_size, "the inner width") * (self.conv_kernel - 1) * storage.conv_itemsize
