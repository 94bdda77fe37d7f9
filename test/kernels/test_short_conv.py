"""The short convolution equals its definition, whatever the batch, and touches only its own states."""

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import short_conv
from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_from_start
from sgl_kernel_ext.short_conv import Activation
from sgl_kernel_ext.state_pool import StateSlots

from . import recurrence
from .batch import (
    LENGTHS,
    MAX_ERROR,
    RAGGED,
    assert_close,
    assert_only_changed,
    cu_seqlens,
    generator,
    pool_of,
    sequences,
)

NUM_CHANNELS = 13


def normal(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*size, generator=generator(seed), dtype=torch.float64).to(dtype)


def filters(width: int = 4) -> tuple[Tensor, Tensor]:
    return normal(NUM_CHANNELS, width, seed=3), normal(NUM_CHANNELS, seed=4)


def initial_states(num_sequences: int, width: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(num_sequences, NUM_CHANNELS, width - 1, seed=2, dtype=dtype)


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_is_the_definition(length: int, dtype: torch.dtype, width: int) -> None:
    x = normal(length, NUM_CHANNELS, dtype=dtype)
    weight, bias = filters(width)
    outputs, _ = recurrence.short_conv(x, weight, bias, True, torch.zeros(NUM_CHANNELS, width - 1))
    found = short_conv.prefill(x, weight, bias, cu_seqlens=cu_seqlens((length,)))
    assert found.dtype == dtype
    assert_close(found, outputs, dtype)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_batch_is_its_sequences_one_by_one(with_bias: bool, activation: Activation) -> None:
    x = normal(sum(RAGGED), NUM_CHANNELS)
    weight, bias = filters()
    bias = bias if with_bias else None
    starts = initial_states(len(RAGGED))
    pool, slots = pool_of(starts)
    before = pool.clone()
    outputs = short_conv.prefill(
        x, weight, bias, cu_seqlens=cu_seqlens(RAGGED), states=StateSlots(pool, slots), activation=activation
    )
    for sequence, own in sequences(RAGGED):
        silu = activation is Activation.SILU
        expected, states = recurrence.short_conv(x[own], weight, bias, silu, starts[sequence])
        assert_close(outputs[own], expected, torch.float64)
        assert torch.equal(pool[slots[sequence]], states[-1])
    assert_only_changed(before, pool, slots)


def test_a_sequence_without_an_initial_state_ignores_what_its_slot_holds() -> None:
    x = normal(sum(RAGGED), NUM_CHANNELS)
    pool, slots = pool_of(torch.full_like(initial_states(len(RAGGED)), torch.nan))
    states = StateSlots(pool, slots, torch.zeros(len(RAGGED), dtype=torch.bool))
    outputs = short_conv.prefill(x, *filters(), cu_seqlens=cu_seqlens(RAGGED), states=states)
    assert torch.equal(outputs, short_conv.prefill(x, *filters(), cu_seqlens=cu_seqlens(RAGGED)))
    assert not pool[slots].isnan().any()


@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_decode_is_a_prefill_of_one_token(dtype: torch.dtype) -> None:
    num_sequences = 5
    x = normal(num_sequences, NUM_CHANNELS, dtype=dtype)
    starts = initial_states(num_sequences, dtype=dtype)
    (pool, slots), (other, _) = pool_of(starts), pool_of(starts)
    before = pool.clone()
    outputs = short_conv.decode(x, *filters(), states=StateSlots(pool, slots))
    expected = short_conv.prefill(
        x, *filters(), cu_seqlens=cu_seqlens((1,) * num_sequences), states=StateSlots(other, slots)
    )
    assert_close(outputs, expected, dtype)
    assert torch.equal(pool[slots], other[slots])
    assert_only_changed(before, pool, slots)


@pytest.mark.parametrize("position", [0, 1, 2, 3, 64, 128, 129, 130])
def test_a_prefill_split_anywhere_is_one_prefill(position: int) -> None:
    x = normal(130, NUM_CHANNELS, dtype=torch.float32)
    starts = initial_states(1, dtype=torch.float32)
    (pool, slots), (other, _) = pool_of(starts), pool_of(starts)
    whole = short_conv.prefill(x, *filters(), cu_seqlens=cu_seqlens((130,)), states=StateSlots(pool, slots))
    parts = [
        short_conv.prefill(part, *filters(), cu_seqlens=cu_seqlens((len(part),)), states=StateSlots(other, slots))
        for part in (x[:position], x[position:])
    ]
    assert_close(torch.cat(parts), whole, torch.float32)
    assert torch.equal(other[slots], pool[slots])


def test_a_padding_sequence_reads_and_writes_nothing() -> None:
    x = normal(sum(RAGGED), NUM_CHANNELS)
    x[RAGGED[0] + 1] = torch.nan
    pool, slots = pool_of(initial_states(len(RAGGED)))
    slots[2] = -1
    before = pool.clone()
    outputs = short_conv.prefill(x, *filters(), cu_seqlens=cu_seqlens(RAGGED), states=StateSlots(pool, slots))
    assert (outputs[RAGGED[0] : RAGGED[0] + RAGGED[2]] == 0).all()
    assert not outputs.isnan().any()
    assert_only_changed(before, pool, slots)
    assert (short_conv.decode(x[-1:], *filters(), states=StateSlots(pool, torch.tensor([-1]))) == 0).all()


@pytest.mark.parametrize(
    ("name", "x", "weight", "bias"),
    [
        ("x", (8, 13, 1), (13, 4), (13,)),
        ("weight", (8, 13), (12, 4), (13,)),
        ("weight", (8, 13), (13, 1), (13,)),
        ("bias", (8, 13), (13, 4), (12,)),
    ],
)
def test_a_bad_input_is_named(name: str, x: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
    given = (torch.zeros(x), torch.zeros(weight), torch.zeros(bias))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        short_conv.prefill(*given, cu_seqlens=cu_seqlens((8,)))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        short_conv.decode(*given, states=StateSlots(initial_states(8), torch.arange(8)))


def test_a_pool_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="a slot of pool must hold"):
        short_conv.decode(normal(1, NUM_CHANNELS), *filters(), states=StateSlots(initial_states(1, 5), torch.arange(1)))


def slot_for_each(where: list[tuple[int, int]], slots: Tensor) -> Spans:
    return spans_from_start(Checkpoints(*zip(*where, strict=True), slots), RAGGED, "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("has", [None, torch.tensor([True, True, False, True])])
@pytest.mark.parametrize("width", [2, 4, 5])
@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_a_checkpoint_is_the_definitions_state_at_any_token(dtype: torch.dtype, width: int, has: Tensor | None) -> None:
    x = normal(sum(RAGGED), NUM_CHANNELS, dtype=dtype)
    starts = initial_states(len(RAGGED), width, dtype)
    where = [(sequence, position) for sequence, length in enumerate(RAGGED) for position in range(length + 1)]
    pool, slots = pool_of(torch.zeros(len(where), NUM_CHANNELS, width - 1, dtype=dtype), len(where) + 3)
    before = pool.clone()
    states = StateSlots(starts, torch.arange(len(RAGGED)), has)
    short_conv.checkpoint(x, states=states, spans=slot_for_each(where, slots), pool=pool)
    expected = []
    for sequence, own in sequences(RAGGED):
        start = starts[sequence] if has is None or has[sequence] else torch.zeros_like(starts[sequence])
        expected.append(recurrence.short_conv(x[own], *filters(width), True, start)[1])
    assert torch.equal(pool[slots], torch.cat(expected).to(dtype))
    assert_only_changed(before, pool, slots)


def test_a_checkpoint_needs_no_states() -> None:
    x = normal(sum(RAGGED), NUM_CHANNELS)
    pool = torch.full((3, NUM_CHANNELS, 3), torch.nan, dtype=x.dtype)
    short_conv.checkpoint(x, states=None, spans=slot_for_each([(2, 2), (1, 0)], torch.tensor([2, 0])), pool=pool)
    assert torch.equal(pool[2], torch.cat([torch.zeros_like(x[:1]), x[65:67]]).T)
    assert (pool[0] == 0).all()
    assert pool[1].isnan().all()


@pytest.mark.parametrize(
    ("name", "x", "pool", "states"),
    [
        ("x", torch.zeros(196), torch.zeros(3, 13, 3), None),
        ("x", torch.zeros(196, 13, dtype=torch.int64), torch.zeros(3, 13, 3), None),
        ("pool", torch.zeros(196, 13), torch.zeros(3, 12, 3), None),
        ("pool", torch.zeros(196, 13), torch.zeros(3, 13, 3, dtype=torch.int32), None),
        ("pool", torch.zeros(196, 13), torch.zeros(3, 13, 0), None),
        ("a slot of pool", torch.zeros(196, 13), torch.zeros(3, 13, 3), torch.zeros(5, 13, 4)),
        ("a slot must be 0 to 2", torch.zeros(196, 13), torch.zeros(3, 13, 3), None),
    ],
)
def test_a_bad_argument_of_a_checkpoint_is_named(name: str, x: Tensor, pool: Tensor, states: Tensor | None) -> None:
    slot = torch.tensor([3 if "must" in name else 1])
    given = None if states is None else StateSlots(states, torch.arange(len(RAGGED)))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        short_conv.checkpoint(x, states=given, spans=slot_for_each([(0, 4)], slot), pool=pool)


def test_a_checkpoint_in_a_slot_that_a_sequence_continues_from_is_refused() -> None:
    x = normal(sum(RAGGED), NUM_CHANNELS)
    pool, slots = pool_of(initial_states(len(RAGGED)))
    before = pool.clone()
    spans = slot_for_each([(0, 4)], slots[3:])
    with pytest.raises(ValueError, match=f"a slot that no sequence continues from, got slot {slots[3]}"):
        short_conv.checkpoint(x, states=StateSlots(pool, slots), spans=spans, pool=pool)
    assert_only_changed(before, pool, torch.tensor([]).long())
    short_conv.checkpoint(x, states=StateSlots(before, slots), spans=spans, pool=pool)


def test_spans_of_a_longer_batch_are_refused() -> None:
    x = normal(sum(RAGGED) - 1, NUM_CHANNELS)
    with pytest.raises(ValueError, match=f"must have the {sum(RAGGED)} tokens of the spans, got {sum(RAGGED) - 1}"):
        short_conv.checkpoint(x, states=None, spans=slot_for_each([(0, 1)], torch.tensor([0])), pool=initial_states(2))


def test_a_sequence_without_a_slot_is_named() -> None:
    x = normal(sum(RAGGED), NUM_CHANNELS)
    states = StateSlots(initial_states(3), torch.arange(3))
    spans = slot_for_each([(3, 1)], torch.tensor([0]))
    with pytest.raises(ValueError, match="states must have 4 rows, one a sequence, got 3"):
        short_conv.checkpoint(x, states=states, spans=spans, pool=initial_states(2))
