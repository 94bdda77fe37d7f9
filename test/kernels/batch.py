"""Batches and state pools for the operators' tests."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LENGTHS = (1, 63, 64, 65, 127, 200)
# Two sequences that share no chunk boundary, an empty one between them, and a single token.
RAGGED = (65, 0, 130, 1)
# Of the largest value that is compared: rounding of the inputs' dtype, grown by a few hundred terms.
MAX_ERROR = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def cu_seqlens(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def sequences(lengths: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Each sequence with its tokens."""
    start = 0
    for sequence, length in enumerate(lengths):
        yield sequence, slice(start, start + length)
        start += length


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pool_of(states: Tensor, num_slots: int = 11) -> tuple[Tensor, Tensor]:
    """A pool that holds `states` in slots of its own and NaN in all others, its slots far apart; and those slots.

    The last slot is never among them: a write to slot -1 would go there.
    """
    num_sequences = states.shape[0]
    wide = torch.full((num_slots, 3, *states.shape[1:]), torch.nan, dtype=states.dtype)
    pool = wide[:, 1]
    slots = torch.randperm(num_slots - 1, generator=generator())[:num_sequences]
    pool[slots] = states
    return pool, slots


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal to the precision of inputs of `dtype`, relative to the largest expected value."""
    scale = expected.abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=MAX_ERROR[dtype] * max(scale, 1e-6))


def assert_only_changed(before: Tensor, after: Tensor, slots: Tensor) -> None:
    """Every slot of the pool beside `slots` has the bits that it had."""
    kept = torch.ones(before.shape[0], dtype=torch.bool)
    kept[slots[slots >= 0]] = False
    assert torch.equal(before[kept].contiguous().view(torch.uint8), after[kept].contiguous().view(torch.uint8))
