"""The operators of recurrent layers, and tokens for them: what `test_operators.py` asks of each of them alike.

A shape is (num_groups, num_heads, value_dim, key_dim), and a state has all of it but the groups.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from sgl_kernel_ext import gated_delta_rule, kda, mamba2
from sgl_kernel_ext.state_pool import StateSlots

from . import recurrence
from .batch import cu_seqlens, generator

SHAPES = ((2, 2, 16, 16), (1, 4, 20, 12), (2, 6, 7, 33))
SHAPE = SHAPES[1]
CHUNK_SIZE = 64
SCALE = 0.3


@dataclass(frozen=True)
class Tokens:
    """The inputs of one operator."""

    operator: ClassVar[ModuleType]
    recurrence: ClassVar[Callable[..., tuple[Tensor, Tensor]]]
    options: ClassVar[dict[str, Any]] = {}
    """Of prefill, decode and the recurrence."""

    def __getitem__(self, index: slice) -> Self:
        raise NotImplementedError

    @property
    def values(self) -> Tensor:
        """What is written into the states, (num_tokens, num_heads, value_dim)."""
        raise NotImplementedError

    def decaying_fast(self) -> Self:
        """The same, of which a state remembers nothing."""
        raise NotImplementedError

    def prefill(self, lengths: tuple[int, ...], **more: Any) -> Any:
        return self.operator.prefill(**vars(self), cu_seqlens=cu_seqlens(lengths), **(self.options | more))

    def decode(self, states: StateSlots) -> Tensor:
        outputs: Tensor = self.operator.decode(**vars(self), states=states, **self.options)
        return outputs

    def expected(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return type(self).recurrence(**vars(self), **self.options, state=state)


@dataclass(frozen=True)
class DeltaTokens(Tokens):
    """Of a delta rule."""

    options: ClassVar[dict[str, Any]] = {"scale": SCALE}
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def __getitem__(self, index: slice) -> Self:
        return replace(self, **{each.name: getattr(self, each.name)[index] for each in fields(self)})

    @property
    def values(self) -> Tensor:
        return self.v

    def decaying_fast(self) -> Self:
        return replace(self, g=torch.full_like(self.g, -80.0))


class GatedDeltaRuleTokens(DeltaTokens):
    operator = gated_delta_rule
    recurrence = staticmethod(recurrence.gated_delta_rule)


class KdaTokens(DeltaTokens):
    operator = kda
    recurrence = staticmethod(recurrence.kda)


@dataclass(frozen=True)
class Mamba2Tokens(Tokens):
    operator = mamba2
    recurrence = staticmethod(recurrence.mamba2)
    x: Tensor
    delta: Tensor
    B: Tensor
    C: Tensor
    A: Tensor
    D: Tensor | None

    def __getitem__(self, index: slice) -> Self:
        return replace(self, x=self.x[index], delta=self.delta[index], B=self.B[index], C=self.C[index])

    @property
    def values(self) -> Tensor:
        return self.x

    def prefill(self, lengths: tuple[int, ...], **more: Any) -> mamba2.Prefill:
        made: mamba2.Prefill = super().prefill(lengths, **({"chunk_size": CHUNK_SIZE} | more))
        return made

    def decaying_fast(self) -> Self:
        return replace(self, A=torch.full_like(self.A, -800.0), delta=torch.full_like(self.delta, 0.1))


def _delta_inputs(num_tokens: int, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    num_groups, num_heads, value_dim, key_dim = shape
    random = generator(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    return {
        "q": normal(num_tokens, num_groups, key_dim).to(dtype),
        "k": torch.nn.functional.normalize(normal(num_tokens, num_groups, key_dim), dim=-1).to(dtype),
        "v": normal(num_tokens, num_heads, value_dim).to(dtype),
        "beta": torch.rand(num_tokens, num_heads, generator=random, dtype=torch.float64),
    }


def gated_delta_rule_tokens(
    num_tokens: int, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float64
) -> GatedDeltaRuleTokens:
    # A memory of some forty tokens: a wrong state shows in every later output.
    g = -0.05 * torch.rand(num_tokens, shape[1], generator=generator(3), dtype=torch.float64)
    return GatedDeltaRuleTokens(**_delta_inputs(num_tokens, shape, dtype), g=g)


def kda_tokens(num_tokens: int, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float64) -> KdaTokens:
    _, num_heads, _, key_dim = shape
    # Channels that remember two tokens beside channels that remember hundreds: a wrong state shows in later outputs.
    memory = torch.logspace(math.log10(2), math.log10(500), key_dim, dtype=torch.float64)
    g = -torch.rand(num_tokens, num_heads, key_dim, generator=generator(3), dtype=torch.float64) / memory
    return KdaTokens(**_delta_inputs(num_tokens, shape, dtype), g=g)


def mamba2_tokens(num_tokens: int, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float64) -> Mamba2Tokens:
    num_groups, num_heads, head_dim, state_dim = shape
    random = generator(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64).to(dtype)

    return Mamba2Tokens(
        x=normal(num_tokens, num_heads, head_dim),
        delta=0.1 * torch.rand(num_tokens, num_heads, generator=random, dtype=torch.float64),
        B=normal(num_tokens, num_groups, state_dim),
        C=normal(num_tokens, num_groups, state_dim),
        # A memory of some forty tokens: a wrong state shows in every later output.
        A=-torch.rand(num_heads, generator=random, dtype=torch.float64),
        D=normal(num_heads),
    )


OPERATORS: tuple[Callable[..., Tokens], ...] = (gated_delta_rule_tokens, kda_tokens, mamba2_tokens)
"""Each by its tokens."""


def initial_states(num_sequences: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(num_sequences, *shape[1:], generator=generator(2), dtype=torch.float64)


def no_state(shape: tuple[int, ...] = SHAPE) -> Tensor:
    """The state before the first token."""
    return torch.zeros(shape[1:], dtype=torch.float64)
