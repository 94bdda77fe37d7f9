"""A gated short convolution over the hidden width, as a layer of its own (LFM2).

    per token  2 D 3D + 2 D D (in, out) + 2 K D (convolution)
    state      a window of (K - 1) D; there is no recurrence

Source: SGLang `configs/lfm2.py` and `models/lfm2.py`.
"""

from dataclasses import dataclass
from typing import ClassVar

from marconi.model.base import FlopCurve, Layer, Storage


@dataclass(frozen=True, slots=True)
class ShortConvolution(Layer):
    """One gated convolution layer. Its channels are split over the workers."""

    kind: ClassVar[str] = "short convolution"

    hidden_size: int
    conv_kernel: int

    @property
    def num_parameters(self) -> int:
        """Two gates and the input, the output, the convolution."""
        return 4 * self.hidden_size**2 + self.hidden_size * self.conv_kernel

    @property
    def flops(self) -> FlopCurve:
        """The same for every token."""
        return FlopCurve(linear=2 * self.num_parameters)

    def convolution_bytes(self, storage: Storage) -> int:
        """The last K - 1 inputs of the worker's channels."""
        return storage.shard(self.hidden_size, "the hidden width") * (self.conv_kernel - 1) * storage.conv_itemsize


@dataclass(frozen=True, slots=True)
class ConvolutionWindow(Layer):
    """Convolutions along a stream of an attention layer (Inkling, ZAYA1): no matrices, a window of their own.

    `head_channels` holds (heads, channels of a head) of streams that are split by head, fewer heads than workers being
    replicated; `whole_channels` those that every worker keeps whole. FLOPs are 2 K a channel and token.
    """

    kind: ClassVar[str] = "short convolution"

    head_channels: tuple[tuple[int, int], ...]
    whole_channels: int
    conv_kernel: int

    @property
    def num_parameters(self) -> int:
        """One kernel a channel."""
        split = sum(num_heads * channels for num_heads, channels in self.head_channels)
        return (split + self.whole_channels) * self.conv_kernel

    @property
    def flops(self) -> FlopCurve:
        """The same for every token."""
        return FlopCurve(linear=2 * self.num_parameters)

    def convolution_bytes(self, storage: Storage) -> int:
        """The last K - 1 inputs of the worker's share of the streams."""
        split = sum(
            storage.shard_or_replicate(num_heads, "the number of heads of a convolved stream") * channels
            for num_heads, channels in self.head_channels
        )
        return (split + self.whole_channels) * (self.conv_kernel - 1) * storage.conv_itemsize
