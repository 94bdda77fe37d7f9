"""What SGLang's layers have in common: the short convolution, the tracked positions, and how operands are taken."""

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .batch import Batch
from .shapes import LayerShape

MODULE = "sglang.kernels.ops.mamba.causal_conv1d_triton"


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """One layer's states (num_slots, *state_shape) and windows (num_slots, num_channels, width - 1)."""

    states: Tensor
    windows: Tensor


@dataclass(slots=True, eq=False)
class Call:
    """A call of a function: its arguments by name, and what it returned."""

    arguments: Mapping[str, Any]
    result: Any


@contextmanager
def calls_of(module: ModuleType, name: str) -> Iterator[list[Call]]:
    """Record the calls that `module` makes of its function `name`."""
    function = getattr(module, name)
    calls: list[Call] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append(Call(inspect.signature(function).bind(*args, **kwargs).arguments, result))
        return result

    with mock.patch.object(module, name, call):
        yield calls


class Convolution:
    """The part that all layers share, and the indices of the tracked positions."""

    def __init__(self, shape: LayerShape, batch: Batch, pools: Pools, dtype: torch.dtype, has_bias: bool) -> None:
        self.shape, self.batch, self.pools, self.dtype = shape, batch, pools, dtype
        self.device = pools.states.device
        self.in_kernel: Mapping[str, Callable[[], object]] = {}
        self.inputs = self.normal(batch.num_tokens, shape.num_channels)
        self._convolve = importlib.import_module(MODULE).causal_conv1d_fn
        self._weight = self.normal(shape.num_channels, shape.conv_width)
        self._bias = self.normal(shape.num_channels) if has_bias else None
        self._starts_anew = torch.zeros(len(batch.lengths), dtype=torch.bool, device=self.device)
        self.slots = self.numbers(range(len(batch.lengths)), torch.int32)
        self.bounds = self.numbers(batch.bounds, torch.int32)
        self.aligned_slots = self.numbers(batch.aligned_slots)
        self.ends = [first + aligned for first, aligned in zip(batch.bounds, batch.aligned, strict=False)]
        places = torch.arange(1 - shape.conv_width, 0, device=self.device)
        self.window_tokens = self.numbers(self.ends)[:, None] + places

    def normal(self, *size: int) -> Tensor:
        """Draw random values."""
        return torch.randn(*size, dtype=self.dtype, device=self.device)

    def numbers(self, values: Iterable[int], dtype: torch.dtype = torch.int64) -> Tensor:
        """Put numbers on the device."""
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def convolved(self) -> Tensor:
        """Run the convolution: (num_tokens, num_channels)."""
        result: Tensor = self._convolve(
            self.inputs.transpose(0, 1),
            self._weight,
            self._bias,
            activation="silu",
            conv_states=self.pools.windows,
            has_initial_state=self._starts_anew,
            cache_indices=self.slots,
            query_start_loc=self.bounds,
            seq_lens_cpu=list(self.batch.lengths),
        )
        return result.transpose(0, 1)

    def track_windows(self) -> None:
        """Copy the windows at the tracked positions."""
        self.pools.windows[self.aligned_slots] = self.inputs[self.window_tokens].transpose(1, 2)

    def split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (1, num_tokens, num_key_heads, key_dim), values (1, num_tokens, num_heads, value_dim)."""
        shape = self.shape
        keys = shape.num_shared_heads * shape.num_columns
        q, k, v = convolved.split([keys, keys, shape.num_heads * shape.num_rows], -1)
        heads = (1, convolved.shape[0], shape.num_shared_heads, shape.num_columns)
        return q.view(heads), k.view(heads), v.view(1, -1, shape.num_heads, shape.num_rows)

    def chunk_rows(self) -> list[int]:
        """Rows of the chunk states at the tracked positions, where every sequence has a grid of its own."""
        size = self.shape.chunk_size
        firsts = accumulate((-(-length // size) for length in self.batch.lengths), initial=0)
        return [first + aligned // size for first, aligned in zip(firsts, self.batch.aligned, strict=False)]
