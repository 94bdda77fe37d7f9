"""An operator equals its recurrence, whatever the batch, and touches only its own states: each of them alike."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext.state_pool import StateSlots

from .batch import LENGTHS, MAX_ERROR, RAGGED, assert_close, assert_only_changed, pool_of, sequences
from .operators import CHUNK_SIZE, OPERATORS, SHAPE, SHAPES, DeltaTokens, Tokens, initial_states, no_state

Make = Callable[..., Tokens]
pytestmark = pytest.mark.parametrize("tokens", OPERATORS, ids=lambda tokens: tokens.__name__.removesuffix("_tokens"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_is_the_recurrence(tokens: Make, length: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = tokens(length, shape, dtype)
    outputs, states = given.expected(no_state(shape))
    result = given.prefill((length,))
    assert result.outputs.dtype == dtype
    assert_close(result.outputs, outputs, dtype)
    assert_close(result.chunk_states, states[:length:CHUNK_SIZE], dtype)
    assert_close(result.final_states[0], states[-1], dtype)


def test_a_scale_that_is_not_given_is_that_of_the_keys(tokens: Make) -> None:
    given = tokens(8)
    if not isinstance(given, DeltaTokens):
        pytest.skip("it has no scale")
    by_keys = given.prefill((8,), scale=SHAPE[3] ** -0.5).outputs
    assert torch.equal(given.prefill((8,), scale=None).outputs, by_keys)
    assert not torch.equal(given.prefill((8,)).outputs, by_keys), "the scale that is given is another"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [1, 16, 17, 64, 100])
def test_a_batch_is_its_sequences_one_by_one(tokens: Make, chunk_size: int, dtype: torch.dtype) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED))
    pool, slots = pool_of(starts)
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots), chunk_size=chunk_size)
    for sequence, own in sequences(RAGGED):
        outputs, states = given[own].expected(starts[sequence])
        assert_close(result.outputs[own], outputs, dtype)
        assert_close(pool[slots[sequence]], states[-1], dtype)
        for start, state in chunk_states(result, chunk_size):
            if own.start <= start < own.stop:
                assert_close(state, states[start - own.start], dtype)
    assert_only_changed(before, pool, slots)


def chunk_states(result: object, chunk_size: int) -> list[tuple[int, Tensor]]:
    """The state before each chunk, by the chunk's first token: chunks lie on a grid of the batch or of a sequence."""
    if hasattr(result, "chunk_starts"):
        starts = result.chunk_starts.tolist()
    else:
        starts = [start for _, own in sequences(RAGGED) for start in range(own.start, own.stop, chunk_size)]
    return list(zip(starts, result.chunk_states, strict=True))  # type: ignore[attr-defined]


def test_a_sequence_without_an_initial_state_ignores_what_its_slot_holds(tokens: Make) -> None:
    given = tokens(sum(RAGGED))
    pool, slots = pool_of(torch.full_like(initial_states(len(RAGGED)), torch.nan))
    has_initial_state = torch.zeros(len(RAGGED), dtype=torch.bool)
    result = given.prefill(RAGGED, states=StateSlots(pool, slots, has_initial_state))
    fresh = given.prefill(RAGGED)
    assert torch.equal(result.outputs, fresh.outputs)
    assert torch.equal(pool[slots], fresh.final_states)


@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_decode_is_a_prefill_of_one_token(tokens: Make, dtype: torch.dtype) -> None:
    num_sequences = 5
    given = tokens(num_sequences, dtype=dtype)
    (pool, slots), (other, _) = pool_of(initial_states(num_sequences)), pool_of(initial_states(num_sequences))
    before = pool.clone()
    outputs = given.decode(StateSlots(pool, slots))
    result = given.prefill((1,) * num_sequences, states=StateSlots(other, slots))
    assert outputs.dtype == dtype
    assert_close(outputs, result.outputs, dtype)
    assert_close(pool[slots], other[slots], torch.promote_types(dtype, torch.float32))
    assert_only_changed(before, pool, slots)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 100, 129, 130])
def test_a_prefill_split_anywhere_is_one_prefill(tokens: Make, position: int) -> None:
    length = 130
    given = tokens(length, dtype=torch.float32)
    (pool, slots), (other, _) = pool_of(initial_states(1)), pool_of(initial_states(1))
    whole = given.prefill((length,), states=StateSlots(pool, slots))
    first = given[:position].prefill((position,), states=StateSlots(other, slots))
    second = given[position:].prefill((length - position,), states=StateSlots(other, slots))
    assert_close(torch.cat([first.outputs, second.outputs]), whole.outputs, torch.float32)
    assert_close(other[slots], pool[slots], torch.float32)


def test_a_padding_sequence_reads_and_writes_nothing(tokens: Make) -> None:
    given = tokens(sum(RAGGED))
    given.values[RAGGED[0] + 1] = torch.nan
    pool, slots = pool_of(initial_states(len(RAGGED)))
    slots[2] = -1
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots))
    padding = slice(RAGGED[0], RAGGED[0] + RAGGED[2])
    assert (result.outputs[padding] == 0).all()
    assert not result.outputs.isnan().any()
    assert (given[-1:].decode(StateSlots(pool, torch.tensor([-1]))) == 0).all()
    assert_only_changed(before, pool, slots)


def test_strong_decay_neither_overflows_nor_leaves_a_trace(tokens: Make) -> None:
    given = tokens(200, dtype=torch.float32).decaying_fast()
    outputs, _ = given.expected(no_state())
    assert_close(given.prefill((200,)).outputs, outputs, torch.float32)


def test_a_state_is_rounded_to_the_dtype_of_its_pool(tokens: Make) -> None:
    pool, slots = pool_of(initial_states(1).bfloat16())
    result = tokens(65, dtype=torch.bfloat16).prefill((65,), states=StateSlots(pool, slots))
    assert result.final_states.dtype == torch.float32
    assert torch.equal(pool[slots], result.final_states.bfloat16())


@pytest.mark.parametrize("states", [initial_states(8)[:, :3], initial_states(8).mT], ids=["heads", "transposed"])
def test_a_pool_of_other_states_is_refused(tokens: Make, states: Tensor) -> None:
    with pytest.raises(ValueError, match="a slot of pool must hold"):
        tokens(8).prefill((8,), states=StateSlots(states, torch.tensor([0])))
