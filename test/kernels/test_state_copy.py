"""A copy moves whole states between slots and leaves every other bit alone."""

import pytest
import torch

from sgl_kernel_ext import state_copy

from .batch import assert_only_changed, generator, pool_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8)


def states(num_states: int, dtype: torch.dtype) -> torch.Tensor:
    return (20 * torch.randn(num_states, 3, 5, 7, generator=generator())).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES[:3])
def test_a_destination_gets_the_bits_of_its_source(dtype: torch.dtype) -> None:
    given = states(3, dtype)
    pool, slots = pool_of(given)
    before = pool.clone()
    free = torch.tensor([slot for slot in range(pool.shape[0]) if slot not in slots.tolist()])[:3]
    state_copy.copy(pool, slots, free)
    assert torch.equal(pool[free], given)
    assert_only_changed(before, pool, free)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_pools_of_all_layers_are_the_pool_of_each_layer(dtype: torch.dtype) -> None:
    layers = states(4 * 6, dtype).reshape(4, 6, 3, 5, 7)
    expected = layers.clone()
    sources, destinations = torch.tensor([0, 5]), torch.tensor([2, 3])
    state_copy.copy(layers, sources, destinations, slot_dim=1)
    for layer in expected:
        state_copy.copy(layer, sources, destinations)
    assert torch.equal(layers, expected)


@pytest.mark.parametrize(("sources", "destinations"), [([1, -1], [-1, 2]), ([-1, -1], [0, 1]), ([], [])])
def test_a_negative_slot_on_either_side_copies_nothing(sources: list[int], destinations: list[int]) -> None:
    pool = states(4, torch.float32)
    before = pool.clone()
    state_copy.copy(pool, torch.tensor(sources, dtype=torch.int32), torch.tensor(destinations, dtype=torch.int32))
    assert torch.equal(pool, before)


def test_a_slot_that_is_source_and_destination_gives_its_old_state() -> None:
    pool = states(3, torch.float32)
    before = pool.clone()
    state_copy.copy(pool, torch.tensor([0, 1]), torch.tensor([1, 2]))
    assert torch.equal(pool, before[[0, 0, 1]])


def test_bad_slots_are_named() -> None:
    pool = states(3, torch.float32)
    with pytest.raises(ValueError, match="source_slots must be"):
        state_copy.copy(pool, torch.tensor([0.0]), torch.tensor([1]))
    with pytest.raises(ValueError, match="destination_slots must be"):
        state_copy.copy(pool, torch.tensor([0]), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="slot_dim must be 0 to 3, a dimension of pool, got 4"):
        state_copy.copy(pool, torch.tensor([0]), torch.tensor([1]), slot_dim=4)


def test_slots_outside_the_pool_are_named() -> None:
    pool = states(3, torch.float32)
    inside, outside = torch.tensor([0, 1]), torch.tensor([3, -1])
    for name, call in (
        ("source_slots", lambda: state_copy.copy(pool, outside, inside)),
        ("destination_slots", lambda: state_copy.copy(pool, inside, outside)),
    ):
        with pytest.raises(ValueError, match=f"^a slot of {name} must be at most 2, inside the pool, got 3"):
            call()
