"""What the tests of all checkpoint kernels share: batches, poisoned pools, and how far a kernel may be off."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from sgl_kernel_ext.checkpoints import Checkpoints

from .batch import generator
from .conftest import IS_INTERPRETED

LENGTHS = (65, 130, 1, 128)
"""Sequences that share no chunk boundary, a single token, and one that ends with its chunk."""
EVERYWHERE = ((0, 1), (0, 63), (0, 64), (0, 65), (1, 64), (1, 127), (1, 129), (1, 130), (2, 1), (3, 65), (3, 128))
"""(sequence, position): around the chunks' ends, the first and the last token."""
DTYPES = (torch.float32, torch.float16) if IS_INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
"""The interpreter computes bfloat16 wrongly."""
MAX_ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the largest value compared, by the narrowest dtype of inputs and pool: a sum of a chunk's terms in float32 with
float32 inputs; twice the rounding of the narrower dtypes, which hold the terms or the state."""


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows with every pair of two factors' values, each of them the one with most new pairs (Cohen et al., 1997)."""

    def pairs(row: Sequence[int]) -> set[Any]:
        return set(combinations(enumerate(row), 2))

    every = [*product(*(range(len(factor)) for factor in factors))]
    missing, rows = set[Any]().union(*map(pairs, every)), []
    while missing:
        rows.append(max(every, key=lambda row: len(missing & pairs(row))))
        missing -= pairs(rows[-1])
    return [tuple(factor[index] for factor, index in zip(factors, row, strict=True)) for row in rows]


def checkpoints(where: Sequence[tuple[int, int]], num_slots: int, device: torch.device) -> Checkpoints:
    """States at `where`, each in a slot of its own; slots are on the device, as an allocator's are."""
    slots = torch.randperm(num_slots, generator=generator(7))[: len(where)]
    return Checkpoints([each[0] for each in where], [each[1] for each in where], slots.to(device))


def poisoned_pool(num_slots: int, state_shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN everywhere, with gaps between the slots, and innermost values that are not side by side."""
    wide = torch.full((num_slots, 3, *state_shape[:-1], 2 * state_shape[-1]), torch.nan, dtype=dtype, device=device)
    return wide[:, 1, ..., ::2]


def assert_states(actual: Tensor, expected: Tensor, slots: Tensor, dtype: torch.dtype) -> None:
    """`slots` of both pools agree; everything else of `actual`, its gaps too, has the bits of the poison."""
    index = slots.long()
    torch.testing.assert_close(
        actual[index].double(),
        expected[index].double(),
        rtol=0,
        atol=MAX_ERROR[dtype] * expected[index].double().abs().max().item() if len(index) else 0,
    )
    base = actual._base if actual._base is not None else actual
    whole = torch.as_strided(actual, (actual.untyped_storage().nbytes() // actual.element_size(),), (1,), 0).clone()
    poison = torch.full_like(whole, torch.nan)
    torch.as_strided(whole, actual.shape, actual.stride(), actual.storage_offset())[index] = torch.nan
    assert base.dtype == actual.dtype
    assert torch.equal(whole.view(torch.uint8), poison.view(torch.uint8)), "written outside the slots"


def narrowest(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that bounds the error."""
    return min(dtypes, key=lambda dtype: -MAX_ERROR[dtype])
