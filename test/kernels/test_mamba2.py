"""The Mamba2 recurrence equals its definition, whatever the batch, and touches only its own states."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import mamba2
from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_from_start, spans_over_batch
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

# (num_groups, num_heads, head_dim, state_dim)
SHAPES = ((2, 2, 16, 16), (1, 4, 20, 12), (2, 6, 7, 33))
CHUNK_SIZE = 64


@dataclass(frozen=True)
class Tokens:
    x: Tensor
    delta: Tensor
    B: Tensor
    C: Tensor
    A: Tensor
    D: Tensor | None

    def __getitem__(self, index: slice) -> "Tokens":
        return replace(self, x=self.x[index], delta=self.delta[index], B=self.B[index], C=self.C[index])

    def prefill(self, lengths: tuple[int, ...], **options: object) -> mamba2.Prefill:
        options = {"chunk_size": CHUNK_SIZE, **options}
        return mamba2.prefill(**vars(self), cu_seqlens=cu_seqlens(lengths), **options)  # type: ignore[arg-type]

    def expected(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence.mamba2(**vars(self), state=state)


def tokens(num_tokens: int, shape: tuple[int, ...] = SHAPES[1], dtype: torch.dtype = torch.float64) -> Tokens:
    num_groups, num_heads, head_dim, state_dim = shape
    random = generator(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64).to(dtype)

    return Tokens(
        x=normal(num_tokens, num_heads, head_dim),
        delta=0.1 * torch.rand(num_tokens, num_heads, generator=random, dtype=torch.float64),
        B=normal(num_tokens, num_groups, state_dim),
        C=normal(num_tokens, num_groups, state_dim),
        # A memory of some forty tokens: a wrong state shows in every later output.
        A=-torch.rand(num_heads, generator=random, dtype=torch.float64),
        D=normal(num_heads),
    )


def initial_states(num_sequences: int, shape: tuple[int, ...] = SHAPES[1]) -> Tensor:
    _, num_heads, head_dim, state_dim = shape
    return torch.randn(num_sequences, num_heads, head_dim, state_dim, generator=generator(2), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_is_the_recurrence(length: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = tokens(length, shape, dtype)
    outputs, states = given.expected(torch.zeros_like(initial_states(1, shape)[0]))
    result = given.prefill((length,))
    assert result.outputs.dtype == dtype
    assert_close(result.outputs, outputs, dtype)
    assert_close(result.chunk_states, states[:length:CHUNK_SIZE], dtype)
    assert_close(result.final_states[0], states[-1], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [1, 16, 64, 100])
def test_a_batch_is_its_sequences_one_by_one(chunk_size: int, dtype: torch.dtype) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED))
    pool, slots = pool_of(starts)
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots), chunk_size=chunk_size)
    for sequence, own in sequences(RAGGED):
        outputs, states = given[own].expected(starts[sequence])
        assert_close(result.outputs[own], outputs, dtype)
        assert_close(pool[slots[sequence]], states[-1], dtype)
        for start, state in zip(result.chunk_starts.tolist(), result.chunk_states, strict=True):
            if own.start <= start < own.stop:
                assert_close(state, states[start - own.start], dtype)
    assert_only_changed(before, pool, slots)


def test_chunks_start_on_the_grid_of_the_batch_and_at_every_sequence() -> None:
    starts = tokens(sum(RAGGED)).prefill(RAGGED).chunk_starts
    assert starts.tolist() == [0, 64, 65, 128, 192, 195]


def test_a_chunk_state_and_the_inputs_give_the_state_at_any_token() -> None:
    chunk_size, length = 16, 40
    given = tokens(length)
    _, states = given.expected(torch.zeros_like(initial_states(1)[0]))
    result = given.prefill((length,), chunk_size=chunk_size)
    inflow = given.B.repeat_interleave(given.x.shape[1] // given.B.shape[1], 1)
    log_decay = given.delta * given.A
    for position in range(length + 1):
        chunk = min(position, length - 1) // chunk_size
        since = slice(chunk * chunk_size, position)
        decay_to_end = (log_decay[since].sum(0) - log_decay[since].cumsum(0)).exp()
        weights = decay_to_end * given.delta[since]
        written = torch.einsum("th,thp,thn->hpn", weights, given.x[since], inflow[since])
        kept = log_decay[since].sum(0).exp()[:, None, None] * result.chunk_states[chunk]
        assert_close(kept + written, states[position], torch.float64)


@pytest.mark.parametrize("D", [None, torch.full((4,), 0.7), torch.linspace(0, 1, 80).reshape(4, 20)])
def test_the_skip_is_absent_one_a_head_or_one_a_channel(D: Tensor | None) -> None:
    given = replace(tokens(5), D=None)
    plain = given.prefill((5,)).outputs
    expected = plain if D is None else plain + given.x * D.double().reshape(4, -1)
    assert_close(replace(given, D=D).prefill((5,)).outputs, expected, torch.float64)


def test_a_sequence_without_an_initial_state_ignores_what_its_slot_holds() -> None:
    given = tokens(sum(RAGGED))
    pool, slots = pool_of(torch.full_like(initial_states(len(RAGGED)), torch.nan))
    has_initial_state = torch.zeros(len(RAGGED), dtype=torch.bool)
    result = given.prefill(RAGGED, states=StateSlots(pool, slots, has_initial_state))
    fresh = given.prefill(RAGGED)
    assert torch.equal(result.outputs, fresh.outputs)
    assert torch.equal(pool[slots], fresh.final_states)


@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_decode_is_a_prefill_of_one_token(dtype: torch.dtype) -> None:
    num_sequences = 5
    given = tokens(num_sequences, dtype=dtype)
    (pool, slots), (other, _) = pool_of(initial_states(num_sequences)), pool_of(initial_states(num_sequences))
    before = pool.clone()
    outputs = mamba2.decode(**vars(given), states=StateSlots(pool, slots))
    result = given.prefill((1,) * num_sequences, states=StateSlots(other, slots))
    assert outputs.dtype == dtype
    assert_close(outputs, result.outputs, dtype)
    assert_close(pool[slots], other[slots], torch.promote_types(dtype, torch.float32))
    assert_only_changed(before, pool, slots)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 65, 100, 129, 130])
def test_a_prefill_split_anywhere_is_one_prefill(position: int) -> None:
    length = 130
    given = tokens(length, dtype=torch.float32)
    (pool, slots), (other, _) = pool_of(initial_states(1)), pool_of(initial_states(1))
    whole = given.prefill((length,), states=StateSlots(pool, slots))
    first = given[:position].prefill((position,), states=StateSlots(other, slots))
    second = given[position:].prefill((length - position,), states=StateSlots(other, slots))
    assert_close(torch.cat([first.outputs, second.outputs]), whole.outputs, torch.float32)
    assert_close(other[slots], pool[slots], torch.float32)


def test_a_padding_sequence_reads_and_writes_nothing() -> None:
    given = tokens(sum(RAGGED))
    given.x[RAGGED[0] + 1] = torch.nan
    pool, slots = pool_of(initial_states(len(RAGGED)))
    slots[2] = -1
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots))
    padding = slice(RAGGED[0], RAGGED[0] + RAGGED[2])
    assert (result.outputs[padding] == 0).all()
    assert not result.outputs.isnan().any()
    last = given[-1:]
    assert (mamba2.decode(**vars(last), states=StateSlots(pool, torch.tensor([-1]))) == 0).all()
    assert_only_changed(before, pool, slots)


def test_strong_decay_neither_overflows_nor_leaves_a_trace() -> None:
    given = tokens(200, dtype=torch.float32)
    given = replace(given, A=torch.full_like(given.A, -800.0), delta=torch.full_like(given.delta, 0.1))
    outputs, _ = given.expected(torch.zeros_like(initial_states(1)[0]))
    assert_close(given.prefill((200,)).outputs, outputs, torch.float32)


def test_a_state_is_rounded_to_the_dtype_of_its_pool() -> None:
    pool, slots = pool_of(initial_states(1).bfloat16())
    result = tokens(65, dtype=torch.bfloat16).prefill((65,), states=StateSlots(pool, slots))
    assert result.final_states.dtype == torch.float32
    assert torch.equal(pool[slots], result.final_states.bfloat16())


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("x", torch.zeros(8, 4)),
        ("x", torch.zeros(8, 4, 20, dtype=torch.int64)),
        ("B", torch.zeros(8, 3, 12)),
        ("B", torch.zeros(8, 1, 12, dtype=torch.bfloat16)),
        ("C", torch.zeros(8, 1, 13)),
        ("delta", torch.zeros(8, 5)),
        ("A", torch.zeros(5)),
        ("A", torch.zeros(4, dtype=torch.int64)),
        ("D", torch.zeros(4, 19)),
    ],
)
def test_a_bad_input_is_named(name: str, bad: Tensor) -> None:
    given = replace(tokens(8, dtype=torch.float32), **{name: bad})
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        given.prefill((8,))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        mamba2.decode(**vars(given), states=StateSlots(initial_states(8), torch.arange(8)))


def test_a_pool_of_other_states_is_refused() -> None:
    with pytest.raises(ValueError, match="a slot of pool must hold"):
        tokens(8).prefill((8,), states=StateSlots(initial_states(8)[:, :3], torch.tensor([0])))


def everywhere(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length + 1)]


def take(
    given: Tokens, result: mamba2.Prefill, starts: Tensor | None, chunk_size: int, spans: Spans, pool: Tensor
) -> None:
    mamba2.checkpoint(
        given.x,
        result.delta,
        result.decay_sums,
        given.B,
        result.grid_states,
        initial_states=starts,
        chunk_size=chunk_size,
        spans=spans,
        pool=pool,
    )


@pytest.mark.parametrize("with_initial_states", [True, False])
@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("chunk_size", [1, 16, 64, 65, 256])
def test_a_checkpoint_is_the_recurrence_at_any_token(
    chunk_size: int, dtype: torch.dtype, with_initial_states: bool
) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED)) if with_initial_states else None
    states = None if starts is None else StateSlots(starts.clone(), torch.arange(len(RAGGED)))
    result = given.prefill(RAGGED, states=states, chunk_size=chunk_size)
    where = everywhere(RAGGED)
    pool, slots = pool_of(torch.zeros(len(where), *result.final_states.shape[1:], dtype=dtype), len(where) + 3)
    before = pool.clone()
    checkpoints = Checkpoints(*zip(*where, strict=True), slots)  # type: ignore[arg-type]
    take(given, result, starts, chunk_size, spans_over_batch(checkpoints, RAGGED, chunk_size, "cpu"), pool)
    expected = []
    for sequence, own in sequences(RAGGED):
        start = torch.zeros_like(result.final_states[0]) if starts is None else starts[sequence]
        expected.append(given[own].expected(start)[1])
    assert_close(pool[slots], torch.cat(expected), dtype)
    assert_only_changed(before, pool, slots)


def test_no_checkpoint_reads_or_writes_nothing() -> None:
    given = tokens(8)
    pool = torch.full((3, 4, 20, 12), torch.nan)
    spans = spans_over_batch(Checkpoints((), (), ()), (8,), CHUNK_SIZE, "cpu")
    take(given, given.prefill((8,)), None, CHUNK_SIZE, spans, pool)
    assert pool.isnan().all()


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("x", torch.zeros(8, 4)),
        ("B", torch.zeros(8, 3, 12)),
        ("B", torch.zeros(8, 1, 12, dtype=torch.int64)),
        ("delta", torch.zeros(8, 4)),
        ("decay_sums", torch.zeros(4, 1, 63)),
        ("chunk_states", torch.zeros(2, 4, 20, 12)),
        ("initial_states", torch.zeros(1, 4, 12, 20)),
        ("chunk_size", 0),
        ("pool", torch.zeros(3, 4, 20, 13)),
        ("pool", torch.zeros(3, 4, 20, 12, dtype=torch.int32)),
    ],
)
def test_a_bad_argument_of_a_checkpoint_is_named(name: str, bad: object) -> None:
    given = tokens(8, dtype=torch.float32)
    result = given.prefill((8,))
    arguments: dict[str, object] = {
        "x": given.x,
        "delta": result.delta,
        "decay_sums": result.decay_sums,
        "B": given.B,
        "chunk_states": result.grid_states,
        "initial_states": None,
        "chunk_size": CHUNK_SIZE,
        "spans": spans_over_batch(Checkpoints((0,), (3,), (1,)), (8,), CHUNK_SIZE, "cpu"),
        "pool": torch.zeros(3, 4, 20, 12),
    }
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        mamba2.checkpoint(**{**arguments, name: bad})  # type: ignore[arg-type]


def test_a_slot_or_a_sequence_that_is_not_there_and_spans_of_another_grid_are_named() -> None:
    given = tokens(100)
    result = given.prefill((100,))
    pool = torch.full((3, 4, 20, 12), torch.nan)

    def spans(position: int, slot: int) -> Spans:
        return spans_over_batch(Checkpoints((0,), (position,), (slot,)), (100,), CHUNK_SIZE, "cpu")

    with pytest.raises(ValueError, match="a slot must be 0 to 2, inside the pool, got 3"):
        take(given, result, None, CHUNK_SIZE, spans(5, 3), pool)
    with pytest.raises(ValueError, match="initial_states must have 1 rows, one a sequence, got 0"):
        take(given, result, torch.zeros(0, 4, 20, 12), CHUNK_SIZE, spans(5, 1), pool)
    of_another_batch = spans_over_batch(Checkpoints((0,), (5,), (1,)), (101,), CHUNK_SIZE, "cpu")
    with pytest.raises(ValueError, match="must have the 101 tokens of the spans, got 100"):
        take(given, result, None, CHUNK_SIZE, of_another_batch, pool)
    from_start = spans_from_start(Checkpoints((0,), (99,), (1,)), (100,), "cpu")
    with pytest.raises(ValueError, match="a span must have at most 64 tokens, the chunk_size, got 99"):
        take(given, result, None, CHUNK_SIZE, from_start, pool)
    assert pool.isnan().all()
