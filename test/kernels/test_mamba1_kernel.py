"""The kernel of Mamba1 writes the states that its reference does, and nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext.checkpoints import Spans, spans_from_start
from sgl_kernel_ext.mamba1 import kernel, reference

from .batch import generator
from .kernel_checks import DTYPES, EVERYWHERE, LENGTHS, assert_states, checkpoints, narrowest, poisoned_pool

SHAPES = ((40, 16), (7, 5), (3, 256))
"""Channels, state_dim: two blocks, the last of them short; no power of two; a block of two channels."""
WHERE = (*EVERYWHERE, (0, 0), (1, 64), (2, 0))
"""In no order, and one position twice."""
NUM_SLOTS = 17


@dataclass(frozen=True)
class Operands:
    x: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    initial_states: Tensor | None


def operands(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, has_initial: bool = True, memory: float = 40.0
) -> Operands:
    """Decaying by half in some `memory` tokens, with NaN between the values in memory."""
    num_channels, state_dim = shape
    random, num_tokens = generator(3), sum(LENGTHS)
    x = torch.randn(num_tokens, num_channels, generator=random).to(dtype)
    delta = torch.rand(num_tokens, num_channels, generator=random)
    A = -torch.rand(num_channels, state_dim, generator=random) / memory
    B = torch.randn(num_tokens, state_dim, generator=random).to(dtype)
    initial = torch.randn(len(LENGTHS), num_channels, state_dim, generator=random)
    x, delta, A, B, initial = (
        torch.stack([each, torch.full_like(each, torch.nan)], -1).to(device)[..., 0]
        for each in (x, delta, A, B, initial)
    )
    return Operands(x, delta, A, B, initial if has_initial else None)


def spans_of(where: Sequence[tuple[int, int]], device: torch.device) -> Spans:
    return spans_from_start(checkpoints(where, NUM_SLOTS, device), LENGTHS, device)


def assert_kernel_is_reference(
    given: Operands, pool_dtype: torch.dtype, where: Sequence[tuple[int, int]] = WHERE
) -> None:
    spans = spans_of(where, given.x.device)
    shape = tuple(given.A.shape)
    expected, actual = (poisoned_pool(NUM_SLOTS, shape, pool_dtype, given.x.device) for _ in range(2))
    reference.checkpoint(**vars(given), spans=spans, pool=expected)
    kernel.checkpoint(**vars(given), spans=spans, pool=actual)
    assert_states(actual, expected, spans.slots, narrowest(given.x.dtype, pool_dtype))


@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_states_at_every_kind_of_position(
    shape: tuple[int, int], dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> None:
    assert_kernel_is_reference(operands(shape, dtype, device), pool_dtype)


@pytest.mark.parametrize("where", [((1, 130), (1, 1)), ((3, 7),), ((2, 1), (0, 9), (2, 1), (0, 8), (2, 0), (0, 0))])
def test_one_scan_serves_a_sequence_whatever_the_order(where: Sequence[tuple[int, int]], device: torch.device) -> None:
    assert_kernel_is_reference(operands(SHAPES[1], torch.float32, device), torch.float32, where)


def test_sequences_without_initial_states_start_from_zero(device: torch.device) -> None:
    assert_kernel_is_reference(operands(SHAPES[1], torch.float32, device, has_initial=False), torch.float32)


def test_strong_decay_leaves_no_trace_and_overflows_nowhere(device: torch.device) -> None:
    assert_kernel_is_reference(operands(SHAPES[1], torch.float32, device, memory=1e-3), torch.float32)


def test_more_spans_than_a_block_holds(device: torch.device) -> None:
    given = operands(SHAPES[1], torch.float32, device)
    where = [(1, position) for position in range(100)]
    spans = spans_from_start(checkpoints(where, 128, device), LENGTHS, device)
    expected, actual = (poisoned_pool(128, SHAPES[1], torch.float32, device) for _ in range(2))
    reference.checkpoint(**vars(given), spans=spans, pool=expected)
    kernel.checkpoint(**vars(given), spans=spans, pool=actual)
    assert_states(actual, expected, spans.slots, torch.float32)


def test_nothing_to_keep_launches_nothing(device: torch.device) -> None:
    pool = poisoned_pool(NUM_SLOTS, SHAPES[0], torch.float32, device)
    spans = spans_of((), device)
    kernel.checkpoint(**vars(operands(SHAPES[0], torch.float32, device)), spans=spans, pool=pool)
    assert_states(pool, pool, spans.slots, torch.float32)


def test_a_wrong_position_is_seen(device: torch.device) -> None:
    """Negative control: the comparison can fail."""
    given = operands(SHAPES[1], torch.float32, device)
    expected, actual = (poisoned_pool(NUM_SLOTS, SHAPES[1], torch.float32, device) for _ in range(2))
    reference.checkpoint(**vars(given), spans=spans_of([(1, 64)], device), pool=expected)
    spans = spans_of([(1, 65)], device)
    kernel.checkpoint(**vars(given), spans=spans, pool=actual)
    with pytest.raises(AssertionError):
        assert_states(actual, expected, spans.slots, torch.float32)
