"""SGLang's prefill of one recurrent layer, its chunk-aligned tracking, and the operands that its kernels leave.

Its Triton functions are called as its backends call them (0.5.23): a short convolution, then the chunk kernels, over
sequences that start from zero. What is elementwise around them (projections, gates, norms) is left out, so a share of
this prefill is more than the share of a layer's.

Tracking, for one position of each sequence at the start of its last chunk: the window of the convolution by two index
operations, and the state

    gated delta rule   the row of the chunk states, by two index operations and a conversion
    KDA                written by the chunk kernel as it passes (`in_kernel`: it with and without), then copied
    Mamba2             the row of the chunk states for a position on the flat grid; all others computed anew

Only modules that import on a machine without SGLang's own compiled kernels are touched. Whatever fails here is upstream
of what is measured: the caller says so and goes on.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from . import convolution, delta_layers, mamba2_layer
from .batch import Batch
from .convolution import Pools
from .operands import Operands
from .shapes import Family, LayerShape

KINDS = {
    Family.GATED_DELTA_RULE: (delta_layers.GATED_DELTA_RULE, delta_layers.GatedDeltaLayer),
    Family.KDA: (delta_layers.KDA, delta_layers.KdaLayer),
    Family.MAMBA2: (mamba2_layer.MODULE, mamba2_layer.Mamba2Layer),
}
"""The module of the chunk kernels and the layer, by family."""


class Layer(Protocol):
    """One layer, prefilled by SGLang."""

    inputs: Tensor
    """(num_tokens, num_channels): inputs of the convolution."""
    in_kernel: Mapping[str, Callable[[], object]]
    """A kernel that tracks while it computes, "tracking" and "not_tracking"; empty where none does."""

    def prefill(self) -> object:
        """Run the convolution and the chunk kernels."""

    def operands(self) -> Operands:
        """Run a prefill and take what it leaves."""

    def track(self) -> object:
        """Copy one chunk-aligned position of each sequence."""


def why_absent(family: Family) -> str | None:
    """Say why SGLang's layer cannot run: the first module that does not import, and the reason; None if it can."""
    for name in (convolution.MODULE, KINDS[family][0]):
        try:
            importlib.import_module(name)
        except Exception as error:  # Of any kind: what is imported is not ours.
            return f"{name}: {first_line(error)}"
    return None


def first_line(error: BaseException) -> str:
    """The kind of `error` and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def layer_of(shape: LayerShape, batch: Batch, pools: Pools, dtype: torch.dtype) -> Layer:
    """Make the layer of `shape`, with random inputs."""
    return KINDS[shape.family][1](shape, batch, pools, dtype)
