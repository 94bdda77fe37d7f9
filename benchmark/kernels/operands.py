"""What a prefill leaves for the launch that writes states, and which bytes of it a launch reads."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor

from sgl_kernel_ext import gated_delta_rule, kda, mamba2
from sgl_kernel_ext.checkpoints import Spans

from .batch import Batch, num_chunks
from .shapes import Family, LayerShape


class Along(Enum):
    """The side of a head's state that values lie along; a head's gate lies along neither."""

    ROWS = auto()
    COLUMNS = auto()
    NEITHER = auto()


@dataclass(frozen=True, slots=True)
class Stream:
    """Values that are read for each token: `width` of each of `num_heads`."""

    num_heads: int
    width: int
    element_bytes: int
    along: Along

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.num_heads * self.width * self.element_bytes


class Operands(Protocol):
    """What the prefill of one layer and batch leaves."""

    chunk_states: Tensor

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The values that a launch reads beside the chunk states."""

    def checkpoint(self, spans: Spans, pool: Tensor) -> None:
        """Write the states of `spans` in one launch."""


def _stream(values: Tensor, along: Along) -> Stream:
    """The stream of `values` (num_tokens, num_heads[, width])."""
    return Stream(values.shape[1], values.shape[2] if values.dim() == 3 else 1, values.element_size(), along)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaOperands:
    """Operands of the gated delta rule, or, with a `log_base`, of KDA."""

    k: Tensor
    corrected_values: Tensor
    decay_sums: Tensor
    chunk_states: Tensor
    log_base: float | None = None

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Keys, values, sums of decays."""
        sums = Along.NEITHER if self.log_base is None else Along.COLUMNS
        return (
            _stream(self.k, Along.COLUMNS),
            _stream(self.corrected_values, Along.ROWS),
            _stream(self.decay_sums, sums),
        )

    def checkpoint(self, spans: Spans, pool: Tensor) -> None:
        """Write the states of `spans` in one launch."""
        given = (self.k, self.corrected_values, self.decay_sums, self.chunk_states)
        if self.log_base is None:
            gated_delta_rule.checkpoint(*given, spans=spans, pool=pool)
        else:
            kda.checkpoint(*given, spans=spans, pool=pool, log_base=self.log_base)


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Operands:
    """Operands of Mamba2, for sequences that start from zero; `delta` and `decay_sums` on the grid of chunks."""

    x: Tensor
    delta: Tensor
    decay_sums: Tensor
    B: Tensor
    chunk_states: Tensor

    @property
    def streams(self) -> tuple[Stream, ...]:
        """Inputs, inflow, step sizes, sums of decays."""
        num_heads = self.x.shape[1]
        return (
            _stream(self.x, Along.ROWS),
            _stream(self.B, Along.COLUMNS),
            Stream(num_heads, 1, self.delta.element_size(), Along.NEITHER),
            Stream(num_heads, 1, self.decay_sums.element_size(), Along.NEITHER),
        )

    def checkpoint(self, spans: Spans, pool: Tensor) -> None:
        """Write the states of `spans` in one launch."""
        mamba2.checkpoint(
            self.x,
            self.delta,
            self.decay_sums,
            self.B,
            self.chunk_states,
            initial_states=None,
            chunk_size=self.delta.shape[-1],
            spans=spans,
            pool=pool,
        )


def stand_in(shape: LayerShape, batch: Batch, dtype: torch.dtype, device: torch.device | str) -> Operands:
    """Draw operands with the shapes and dtypes of SGLang's, for a machine without it."""
    heads, rows, columns = shape.state_shape
    chunk = shape.chunk_size

    def normal(*size: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, dtype=kind, device=device)

    def sums(*size: int) -> Tensor:
        return -torch.rand(*size, dtype=torch.float32, device=device)

    keys = normal(batch.num_tokens, shape.num_shared_heads, columns)
    values = normal(batch.num_tokens, heads, rows)
    chunks = num_chunks(shape, batch)
    match shape.family:
        case Family.GATED_DELTA_RULE:
            return DeltaOperands(keys, values, sums(batch.num_tokens, heads), normal(chunks, *shape.state_shape))
        case Family.KDA:
            gates = sums(batch.num_tokens, heads, columns)
            return DeltaOperands(keys, values, gates, normal(chunks, *shape.state_shape), log_base=2.0)
        case Family.MAMBA2:
            states = normal(chunks, *shape.state_shape, kind=torch.float32)
            return Mamba2Operands(values, -sums(heads, chunks, chunk), sums(heads, chunks, chunk), keys, states)
