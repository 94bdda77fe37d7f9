"""The kernel of the short convolution writes the windows that its reference does, and nothing else."""

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_from_start
from sgl_kernel_ext.short_conv import kernel, reference
from sgl_kernel_ext.state_pool import StateSlots

from .batch import generator
from .kernel_checks import DTYPES, EVERYWHERE, LENGTHS, checkpoints, pairwise, poisoned_pool

WHERE = (*EVERYWHERE, (0, 0), (0, 2), (1, 1), (1, 3), (2, 0))
"""Windows that begin before their sequence among them."""
NUM_CHANNELS = (13, 600)
"""Less than a block; several, the last of them short."""
COMBINED = pairwise(NUM_CHANNELS, (2, 4, 5), DTYPES, DTYPES)
NUM_SLOTS = 24
NUM_FOR_SEQUENCES = 5
"""The first slots are the sequences' own, the others are for checkpoints."""


def inputs(num_channels: int, dtype: torch.dtype, device: torch.device, *, transposed: bool = False) -> Tensor:
    """With NaN between the values in memory."""
    x = torch.full((sum(LENGTHS), 2 * num_channels), torch.nan, dtype=dtype, device=device)
    if transposed:
        x = torch.full((2 * num_channels, sum(LENGTHS)), torch.nan, dtype=dtype, device=device).T
    x = x[:, ::2]
    x.copy_(torch.randn(x.shape, generator=generator(3)))
    return x


def pool_of(num_channels: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Windows in the sequences' slots, NaN everywhere else."""
    pool = poisoned_pool(NUM_SLOTS, (num_channels, width - 1), dtype, device)
    pool[:NUM_FOR_SEQUENCES] = torch.randn(NUM_FOR_SEQUENCES, num_channels, width - 1, generator=generator(5)).to(pool)
    return pool


def states_of(pool: Tensor, *, slots_dtype: torch.dtype = torch.int32) -> StateSlots:
    """One sequence continues, one starts anew in a slot that holds a state, one is padding, one continues."""
    slots = torch.tensor([4, 0, -1, 2], dtype=slots_dtype, device=pool.device)
    return StateSlots(pool, slots, torch.tensor([True, False, True, True], device=pool.device))


def spans_of(where: Checkpoints, device: torch.device) -> Spans:
    slots = torch.as_tensor(where.slots, device=device) + NUM_FOR_SEQUENCES
    return spans_from_start(Checkpoints(where.sequences, where.positions, slots), LENGTHS, device)


def all_spans(device: torch.device) -> Spans:
    return spans_of(checkpoints(WHERE, NUM_SLOTS - NUM_FOR_SEQUENCES, device), device)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """In the slots and in the gaps between them: windows are copied."""
    whole = (
        each.as_strided((each.untyped_storage().nbytes() // each.element_size(),), (1,), 0)
        for each in (actual, expected)
    )
    assert torch.equal(*(each.view(torch.uint8) for each in whole))


@pytest.mark.parametrize(
    ("num_channels", "width", "dtype", "pool_dtype"), pairwise(NUM_CHANNELS, [2, 4, 5], DTYPES, DTYPES)
)
def test_windows_at_every_kind_of_position(
    num_channels: int, width: int, dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> None:
    x = inputs(num_channels, dtype, device)
    expected, actual = (pool_of(num_channels, width, pool_dtype, device) for _ in range(2))
    spans = all_spans(device)
    reference.checkpoint(x, states=states_of(expected), spans=spans, pool=expected)
    kernel.checkpoint(x, states=states_of(actual), spans=spans, pool=actual)
    assert not actual[spans.slots].isnan().any()
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_inputs_and_pools_lie_in_memory_as_they_like(transposed: bool, device: torch.device) -> None:
    x = inputs(600, torch.float32, device, transposed=transposed)
    expected, actual = (pool_of(600, 4, torch.float16, device).mT.contiguous().mT for _ in range(2))
    spans = all_spans(device)
    reference.checkpoint(x, states=states_of(expected), spans=spans, pool=expected)
    kernel.checkpoint(x, states=states_of(actual, slots_dtype=torch.int64), spans=spans, pool=actual)
    assert_same_bits(actual, expected)


def test_windows_of_another_pool_are_continued_from(device: torch.device) -> None:
    x = inputs(13, torch.float32, device)
    states = states_of(pool_of(13, 4, torch.float16, device))
    expected, actual = (poisoned_pool(NUM_SLOTS, (13, 3), torch.float32, device) for _ in range(2))
    spans = all_spans(device)
    reference.checkpoint(x, states=states, spans=spans, pool=expected)
    kernel.checkpoint(x, states=states, spans=spans, pool=actual)
    assert_same_bits(actual, expected)


def test_without_states_or_without_a_mask(device: torch.device) -> None:
    x = inputs(13, torch.float32, device)
    spans = all_spans(device)
    for has_states in (True, False):
        expected, actual = (pool_of(13, 4, torch.float32, device) for _ in range(2))
        for take, pool in ((reference.checkpoint, expected), (kernel.checkpoint, actual)):
            states = StateSlots(pool, torch.tensor([1, 3, -1, 0], device=device)) if has_states else None
            take(x, states=states, spans=spans, pool=pool)
        assert_same_bits(actual, expected)


def test_nothing_to_keep_launches_nothing(device: torch.device) -> None:
    pool, before = (pool_of(13, 4, torch.float32, device) for _ in range(2))
    spans = spans_of(checkpoints((), NUM_SLOTS, device), device)
    kernel.checkpoint(inputs(13, torch.float32, device), states=states_of(pool), spans=spans, pool=pool)
    assert_same_bits(pool, before)


def test_a_wrong_position_is_seen(device: torch.device) -> None:
    """Negative control: the comparison can fail."""
    x = inputs(13, torch.float32, device)
    expected, actual = (pool_of(13, 4, torch.float32, device) for _ in range(2))
    for take, pool, position in ((reference.checkpoint, expected, 64), (kernel.checkpoint, actual, 65)):
        spans = spans_of(checkpoints([(1, position)], NUM_SLOTS - NUM_FOR_SEQUENCES, device), device)
        take(x, states=states_of(pool), spans=spans, pool=pool)
    with pytest.raises(AssertionError):
        assert_same_bits(actual, expected)
