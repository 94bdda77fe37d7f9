"""The kernel of copies moves the bits that its reference does, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext.state_copy import kernel, reference

from .batch import generator

DTYPES = (torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUM_SLOTS = 9


def contiguous(dtype: torch.dtype) -> Tensor:
    """Layers, slots, channels, width: several pieces a layer, the last of them short."""
    return made((3, NUM_SLOTS, 1500, 3), dtype)


def transposed(dtype: torch.dtype) -> Tensor:
    return made((3, NUM_SLOTS, 3, 50), dtype).mT


def slots_outermost(dtype: torch.dtype) -> Tensor:
    return made((NUM_SLOTS, 3, 2, 40), dtype).transpose(0, 1)


def with_gaps(dtype: torch.dtype) -> Tensor:
    """Between the layers, the slots and the values, and heads that do not lie end to end."""
    return made((3, 2 * NUM_SLOTS, 4, 5, 14), dtype)[:, ::2, ::3, :, ::2]


LAYOUTS = (contiguous, transposed, slots_outermost, with_gaps)


def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits, NaN among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator()).view(dtype).reshape(shape)


def memory_of(pool: Tensor) -> Tensor:
    """All elements that `pool` lies in, those between its own too."""
    num_elements = pool.untyped_storage().nbytes() // pool.element_size()
    return pool.as_strided((num_elements,), (1,), 0)


def on(device: torch.device, pool: Tensor) -> tuple[Tensor, Tensor]:
    """Two of the same bits and layout."""
    first, second = (
        memory_of(pool).to(device, copy=True).as_strided(pool.shape, pool.stride(), pool.storage_offset())
        for _ in range(2)
    )
    return first, second


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """In the slots and in the gaps between them."""
    assert torch.equal(*(memory_of(each).view(torch.uint8) for each in (actual, expected)))


@pytest.mark.parametrize("slots_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_across_all_layers(
    layout: Callable[[torch.dtype], Tensor], dtype: torch.dtype, slots_dtype: torch.dtype, device: torch.device
) -> None:
    expected, actual = on(device, layout(dtype))
    sources = torch.tensor([1, 8, -1, 4, 1, 5, 2], dtype=slots_dtype, device=device)
    destinations = torch.tensor([0, 3, 6, -1, 7, 5, -9], dtype=slots_dtype, device=device)
    reference.copy(expected, sources, destinations, slot_dim=1)
    kernel.copy(actual, sources, destinations, slot_dim=1)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pool_of_one_layer(layout: Callable[[torch.dtype], Tensor], device: torch.device) -> None:
    expected, actual = on(device, layout(torch.float32))
    sources, destinations = torch.tensor([1, 8], device=device), torch.tensor([0, 3], device=device)
    reference.copy(expected[1], sources, destinations)
    kernel.copy(actual[1], sources, destinations)
    assert_same_bits(actual, expected)


def test_slots_of_a_single_value(device: torch.device) -> None:
    expected, actual = on(device, made((NUM_SLOTS,), torch.int8))
    sources, destinations = torch.tensor([1, 8], device=device), torch.tensor([0, 3], device=device)
    reference.copy(expected, sources, destinations)
    kernel.copy(actual, sources, destinations)
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("slots", [[], [-1, -1]])
def test_with_nothing_to_copy_no_bit_changes(slots: list[int], device: torch.device) -> None:
    before, actual = on(device, contiguous(torch.float32))
    none = torch.tensor(slots, dtype=torch.int64, device=device)
    kernel.copy(actual, none, none + 3, slot_dim=1)
    assert_same_bits(actual, before)


def test_more_slots_than_a_launch_takes(device: torch.device) -> None:
    """Most of them negative: the kernel's time goes with what is copied."""
    expected, actual = on(device, made((2, 100, 3), torch.float16))
    sources, destinations = (torch.full((2500,), -1, device=device) for _ in range(2))
    for slot, which in enumerate((0, 1023, 1024, 2047, 2048, 2499)):
        sources[which], destinations[which] = slot, 40 + slot
    reference.copy(expected, sources, destinations, slot_dim=1)
    kernel.copy(actual, sources, destinations, slot_dim=1)
    assert_same_bits(actual, expected)


def test_slots_that_are_every_other_of_a_vector(device: torch.device) -> None:
    expected, actual = on(device, contiguous(torch.float32))
    slots = torch.tensor([1, 2, 8, 3, 0, 4], device=device)
    reference.copy(expected, slots[::2], slots[1::2], slot_dim=1)
    kernel.copy(actual, slots[::2], slots[1::2], slot_dim=1)
    assert_same_bits(actual, expected)


def test_addresses_past_31_bits(device: torch.device) -> None:
    """Three slots of 32 bytes, 1 GiB apart; of what lies between no page is ever touched."""
    memory = torch.empty((2 << 30) + 32, dtype=torch.int8, device=device)
    pool = memory.as_strided((3, 32), (1 << 30, 1))
    pool.copy_(torch.arange(96).reshape(3, 32))
    kernel.copy(pool, torch.tensor([2], device=device), torch.tensor([0], device=device))
    assert pool[0].tolist() == list(range(64, 96))
    assert pool[1:].tolist() == [list(range(32, 64)), list(range(64, 96))]


def test_a_wrong_slot_is_seen(device: torch.device) -> None:
    """Negative control: the comparison can fail."""
    expected, actual = on(device, contiguous(torch.float32))
    sources = torch.tensor([1], device=device)
    reference.copy(expected, sources, torch.tensor([2], device=device), slot_dim=1)
    kernel.copy(actual, sources, torch.tensor([3], device=device), slot_dim=1)
    with pytest.raises(AssertionError):
        assert_same_bits(actual, expected)


def test_a_slot_that_is_source_and_destination_is_refused_where_it_can_be_seen() -> None:
    pool = made((2, NUM_SLOTS, 4), torch.float32)
    with pytest.raises(ValueError, match="got 1 twice or as a source"):
        kernel.copy(pool, torch.tensor([0, 1]), torch.tensor([1, 2]), slot_dim=1)
    with pytest.raises(ValueError, match="got 4 twice or as a source"):
        kernel.copy(pool, torch.tensor([0, 1]), torch.tensor([4, 4]), slot_dim=1)


def test_a_pool_that_the_kernel_does_not_take_is_named() -> None:
    slots = torch.tensor([1])
    with pytest.raises(ValueError, match=r"pool must have elements of .* bytes, got torch\.complex128"):
        kernel.copy(torch.zeros(3, 2, dtype=torch.complex128), slots, slots + 1)
    with pytest.raises(ValueError, match=r"pool must have at most 4 dimensions"):
        kernel.copy(torch.zeros(3, *(4,) * 5)[:, ::2, ::2, ::2, ::2, ::2], slots, slots + 1)
    with pytest.raises(ValueError, match="slots must be on cpu, where the pool is, got meta"):
        kernel.copy(torch.zeros(3, 4), slots.to("meta"), slots.to("meta"))
