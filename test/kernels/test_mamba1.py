"""The Mamba1 recurrence equals its definition, whatever the batch, and touches only its own states."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import mamba1
from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_from_start
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

SHAPES = ((6, 16), (5, 3))
"""num_channels, state_dim"""
SHAPE = SHAPES[1]


@dataclass(frozen=True)
class Tokens:
    x: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None

    def __getitem__(self, index: slice) -> "Tokens":
        return replace(self, x=self.x[index], delta=self.delta[index], B=self.B[index], C=self.C[index])

    def prefill(self, lengths: tuple[int, ...], **options: object) -> mamba1.Prefill:
        return mamba1.prefill(**vars(self), cu_seqlens=cu_seqlens(lengths), **options)  # type: ignore[arg-type]

    def expected(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence.mamba1(**vars(self), state=state)

    def checkpoint(self, starts: Tensor | None, spans: Spans, pool: Tensor) -> None:
        mamba1.checkpoint(self.x, self.delta, self.A, self.B, initial_states=starts, spans=spans, pool=pool)


def tokens(num_tokens: int, shape: tuple[int, int] = SHAPE, dtype: torch.dtype = torch.float64) -> Tokens:
    num_channels, state_dim = shape
    random = generator(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    return Tokens(
        x=normal(num_tokens, num_channels).to(dtype),
        # A memory of some forty tokens: a wrong state shows in every later output.
        delta=0.1 * torch.rand(num_tokens, num_channels, generator=random, dtype=torch.float64),
        A=-torch.rand(num_channels, state_dim, generator=random, dtype=torch.float64),
        B=normal(num_tokens, state_dim).to(dtype),
        C=normal(num_tokens, state_dim).to(dtype),
        D=normal(num_channels),
    )


def initial_states(num_sequences: int, shape: tuple[int, int] = SHAPE) -> Tensor:
    return torch.randn(num_sequences, *shape, generator=generator(2), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_is_the_recurrence(length: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    given = tokens(length, shape, dtype)
    outputs, states = given.expected(torch.zeros(shape))
    result = given.prefill((length,))
    assert result.outputs.dtype == dtype
    assert_close(result.outputs, outputs, dtype)
    assert_close(result.final_states[0], states[-1], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_batch_is_its_sequences_one_by_one(dtype: torch.dtype) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED))
    pool, slots = pool_of(starts)
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots))
    for sequence, own in sequences(RAGGED):
        outputs, states = given[own].expected(starts[sequence])
        assert_close(result.outputs[own], outputs, dtype)
        assert_close(pool[slots[sequence]], states[-1], dtype)
    assert_only_changed(before, pool, slots)


@pytest.mark.parametrize("with_initial_states", [True, False])
@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_a_checkpoint_is_the_recurrence_at_any_token(dtype: torch.dtype, with_initial_states: bool) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED)) if with_initial_states else None
    where = [(sequence, position) for sequence, length in enumerate(RAGGED) for position in range(length + 1)]
    pool, slots = pool_of(torch.zeros(len(where), *SHAPE, dtype=dtype), len(where) + 3)
    before = pool.clone()
    expected = []
    for sequence, own in sequences(RAGGED):
        expected.append(given[own].expected(torch.zeros(SHAPE) if starts is None else starts[sequence])[1])
    shuffled = torch.randperm(len(where), generator=generator(4))
    checkpoints = Checkpoints(*zip(*(where[i] for i in shuffled), strict=True), slots)  # type: ignore[arg-type]
    given.checkpoint(starts, spans_from_start(checkpoints, RAGGED, "cpu"), pool)
    assert_close(pool[slots], torch.cat(expected)[shuffled], dtype)
    assert_only_changed(before, pool, slots)


def test_no_checkpoint_reads_or_writes_nothing() -> None:
    pool = torch.full((3, *SHAPE), torch.nan)
    tokens(8).checkpoint(None, spans_from_start(Checkpoints((), (), ()), (8,), "cpu"), pool)
    assert pool.isnan().all()


@pytest.mark.parametrize("D", [None, torch.full((5,), 0.7)])
def test_the_skip_is_absent_or_one_a_channel(D: Tensor | None) -> None:
    given = replace(tokens(5), D=None)
    plain = given.prefill((5,)).outputs
    expected = plain if D is None else plain + given.x * D.double()
    assert_close(replace(given, D=D).prefill((5,)).outputs, expected, torch.float64)


def test_a_sequence_without_an_initial_state_ignores_what_its_slot_holds() -> None:
    given = tokens(sum(RAGGED))
    pool, slots = pool_of(torch.full_like(initial_states(len(RAGGED)), torch.nan))
    result = given.prefill(RAGGED, states=StateSlots(pool, slots, torch.zeros(len(RAGGED), dtype=torch.bool)))
    fresh = given.prefill(RAGGED)
    assert torch.equal(result.outputs, fresh.outputs)
    assert torch.equal(pool[slots], fresh.final_states)


@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_decode_is_a_prefill_of_one_token(dtype: torch.dtype) -> None:
    given = tokens(5, dtype=dtype)
    (pool, slots), (other, _) = pool_of(initial_states(5)), pool_of(initial_states(5))
    before = pool.clone()
    outputs = mamba1.decode(**vars(given), states=StateSlots(pool, slots))
    result = given.prefill((1,) * 5, states=StateSlots(other, slots))
    assert outputs.dtype == dtype
    assert_close(outputs, result.outputs, dtype)
    assert_close(pool[slots], other[slots], torch.promote_types(dtype, torch.float32))
    assert_only_changed(before, pool, slots)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 129, 130])
def test_a_prefill_split_anywhere_is_one_prefill_bit_for_bit(position: int) -> None:
    given = tokens(130, dtype=torch.float32)
    (pool, slots), (other, _) = pool_of(initial_states(1)), pool_of(initial_states(1))
    whole = given.prefill((130,), states=StateSlots(pool.float(), slots))
    kept = other.float()
    first = given[:position].prefill((position,), states=StateSlots(kept, slots))
    second = given[position:].prefill((130 - position,), states=StateSlots(kept, slots))
    assert torch.equal(torch.cat([first.outputs, second.outputs]), whole.outputs)
    assert torch.equal(second.final_states, whole.final_states)


def test_a_padding_sequence_reads_and_writes_nothing() -> None:
    given = tokens(sum(RAGGED))
    given.x[RAGGED[0] + 1] = torch.nan
    pool, slots = pool_of(initial_states(len(RAGGED)))
    slots[2] = -1
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots))
    assert (result.outputs[RAGGED[0] : RAGGED[0] + RAGGED[2]] == 0).all()
    assert not result.outputs.isnan().any()
    last = given[-1:]
    assert (mamba1.decode(**vars(last), states=StateSlots(pool, torch.tensor([-1]))) == 0).all()
    assert_only_changed(before, pool, slots)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("x", torch.zeros(8)),
        ("x", torch.zeros(8, 5, dtype=torch.int64)),
        ("B", torch.zeros(7, 3)),
        ("B", torch.zeros(8, 3, dtype=torch.int32)),
        ("delta", torch.zeros(8, 4)),
        ("A", torch.zeros(5, 4)),
        ("A", torch.zeros(5, 3, dtype=torch.int64)),
        ("B", torch.zeros(8, 3, dtype=torch.bfloat16)),
        ("C", torch.zeros(8, 4)),
        ("D", torch.zeros(4)),
    ],
)
def test_a_bad_input_is_named(name: str, bad: Tensor) -> None:
    given = replace(tokens(8, dtype=torch.float32), **{name: bad})
    with pytest.raises(ValueError, match=rf"\b{name}\b.*expected"):
        given.prefill((8,))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*expected"):
        mamba1.decode(**vars(given), states=StateSlots(initial_states(8), torch.arange(8)))


def spans(position: int = 3, slot: int = 1, sequence: int = 0) -> Spans:
    return spans_from_start(Checkpoints((sequence,), (position,), (slot,)), (4, 4), "cpu")


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("x", torch.zeros(8)),
        ("B", torch.zeros(7, 3)),
        ("delta", torch.zeros(8, 4)),
        ("A", torch.zeros(5, 4)),
        ("initial_states", torch.zeros(2, 3, 5)),
        ("pool", torch.zeros(3, 5, 4)),
        ("pool", torch.zeros(3, 5, 3, dtype=torch.int32)),
        ("slot 3 is outside the pool", spans(slot=3)),
        ("initial_states", initial_states(1)),
        ("8 tokens", spans_from_start(Checkpoints((1,), (1,), (0,)), (4, 5), "cpu")),
    ],
)
def test_a_bad_argument_of_a_checkpoint_is_named(name: str, bad: Tensor | Spans) -> None:
    given = tokens(8, dtype=torch.float32)
    arguments: dict[str, object] = {
        **{each: getattr(given, each) for each in ("x", "delta", "A", "B")},
        "initial_states": initial_states(2),
        "spans": spans(),
        "pool": torch.zeros(3, *SHAPE),
    }
    changed = {"spans": bad} if isinstance(bad, Spans) else {name: bad}
    with pytest.raises(ValueError, match=rf"\b{name}\b.*expected"):
        mamba1.checkpoint(**{**arguments, **changed})  # type: ignore[arg-type]
