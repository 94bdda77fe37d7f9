"""Linear attention under a constant decay is its recurrence, whatever the batch, and touches only its own states."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import simple_decay
from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_from_start, spans_per_sequence
from sgl_kernel_ext.simple_decay import reference
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

# (num_key_heads, num_value_heads, key_dim, value_dim)
SHAPES = ((2, 2, 16, 16), (1, 4, 12, 20), (2, 6, 33, 7))
SCALE = 0.3


@dataclass(frozen=True)
class Tokens:
    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor

    def __getitem__(self, index: slice) -> "Tokens":
        return Tokens(self.q[index], self.k[index], self.v[index], self.log_decay)

    def prefill(self, lengths: tuple[int, ...], **options: object) -> simple_decay.Prefill:
        return simple_decay.prefill(**vars(self), cu_seqlens=cu_seqlens(lengths), **options)  # type: ignore[arg-type]

    def expected(self, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return recurrence.simple_decay(**vars(self), scale=scale, state=state)


def tokens(num_tokens: int, shape: tuple[int, ...] = SHAPES[1], dtype: torch.dtype = torch.float64) -> Tokens:
    num_key_heads, num_value_heads, key_dim, value_dim = shape
    random = generator(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(num_tokens, *size, generator=random, dtype=torch.float64).to(dtype)

    return Tokens(
        q=normal(num_key_heads, key_dim),
        k=normal(num_key_heads, key_dim) * key_dim**-0.5,
        v=normal(num_value_heads, value_dim),
        # As the models have it: from a memory of two tokens to one of hundreds, and a head that forgets nothing.
        log_decay=torch.cat([-0.5 / 4 ** torch.arange(num_value_heads - 1, dtype=torch.float64), torch.zeros(1)]),
    )


def initial_states(num_sequences: int, shape: tuple[int, ...] = SHAPES[1]) -> Tensor:
    _, num_value_heads, key_dim, value_dim = shape
    return torch.randn(num_sequences, num_value_heads, key_dim, value_dim, generator=generator(2), dtype=torch.float64)


def every_position(sequence: int, length: int) -> Checkpoints:
    return Checkpoints([sequence] * (length + 1), range(length + 1), range(length + 1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill_is_the_recurrence(length: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    given = tokens(length, shape, dtype)
    outputs, states = given.expected(torch.zeros_like(initial_states(1, shape)[0]), shape[2] ** -0.5)
    result = given.prefill((length,))
    assert result.outputs.dtype == dtype
    assert_close(result.outputs, outputs, dtype)
    assert_close(result.chunk_states, states[:length:64], dtype)
    assert_close(result.final_states[0], states[-1], dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("chunk_size", [1, 16, 64, 100])
def test_a_batch_is_its_sequences_one_by_one(chunk_size: int, dtype: torch.dtype) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED))
    pool, slots = pool_of(starts)
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots), scale=SCALE, chunk_size=chunk_size)
    chunk_states = []
    for sequence, own in sequences(RAGGED):
        outputs, states = given[own].expected(starts[sequence], SCALE)
        assert_close(result.outputs[own], outputs, dtype)
        assert_close(pool[slots[sequence]], states[-1], dtype)
        chunk_states.append(states[: RAGGED[sequence] : chunk_size])
    assert_close(result.chunk_states, torch.cat(chunk_states), dtype)
    assert_only_changed(before, pool, slots)


@pytest.mark.parametrize("with_initial_states", [True, False])
@pytest.mark.parametrize("from_chunks", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_checkpoint_at_any_token_is_the_recurrence(
    dtype: torch.dtype, from_chunks: bool, with_initial_states: bool
) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED))
    if not with_initial_states:
        starts.zero_()
    pool, slots = pool_of(starts)
    made = given.prefill(RAGGED, states=StateSlots(pool, slots))
    for sequence, own in sequences(RAGGED):
        length = RAGGED[sequence]
        where = every_position(sequence, length)
        if from_chunks and not length:
            continue
        spans = spans_per_sequence(where, RAGGED, 64, "cpu") if from_chunks else spans_from_start(where, RAGGED, "cpu")
        _, states = given[own].expected(starts[sequence], 1.0)
        kept = torch.full_like(states, torch.nan)
        simple_decay.checkpoint(
            given.k,
            given.v,
            given.log_decay,
            made.chunk_states if from_chunks else None,
            spans=spans,
            pool=kept,
            initial_states=starts if with_initial_states else None,
        )
        assert_close(kept, states, dtype)


def test_a_long_span_is_taken_in_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_BLOCK_TOKENS", 7)
    given, start = tokens(130), initial_states(1)
    _, states = given.expected(start[0], 1.0)
    kept = torch.full_like(states, torch.nan)
    spans = spans_from_start(every_position(0, 130), (130,), "cpu")
    simple_decay.checkpoint(given.k, given.v, given.log_decay, None, spans=spans, pool=kept, initial_states=start)
    assert_close(kept, states, torch.float64)


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
    outputs = simple_decay.decode(**vars(given), states=StateSlots(pool, slots), scale=SCALE)
    result = given.prefill((1,) * num_sequences, states=StateSlots(other, slots), scale=SCALE)
    assert outputs.dtype == dtype
    assert_close(outputs, result.outputs, dtype)
    assert_close(pool[slots], other[slots], torch.promote_types(dtype, torch.float32))
    assert_only_changed(before, pool, slots)


def test_a_padding_sequence_reads_and_writes_nothing() -> None:
    given = tokens(sum(RAGGED))
    given.v[RAGGED[0] + 1] = torch.nan
    pool, slots = pool_of(initial_states(len(RAGGED)))
    slots[2] = -1
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots))
    padding = slice(RAGGED[0], RAGGED[0] + RAGGED[2])
    assert (result.outputs[padding] == 0).all()
    assert not result.outputs.isnan().any()
    assert (simple_decay.decode(**vars(given[-1:]), states=StateSlots(pool, torch.tensor([-1]))) == 0).all()
    assert_only_changed(before, pool, slots)


def test_strong_decay_neither_overflows_nor_leaves_a_trace() -> None:
    given = tokens(200, dtype=torch.float32)
    given = replace(given, log_decay=torch.full((4,), -80.0))
    result = given.prefill((200,))
    outputs, states = given.expected(torch.zeros_like(initial_states(1)[0]), SHAPES[1][2] ** -0.5)
    assert_close(result.outputs, outputs, torch.float32)
    kept = torch.full_like(states, torch.nan, dtype=torch.float32)
    spans = spans_from_start(every_position(0, 200), (200,), "cpu")
    simple_decay.checkpoint(given.k, given.v, given.log_decay, None, spans=spans, pool=kept)
    assert_close(kept, states, torch.float32)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("v", torch.zeros(8, 4)),
        ("v", torch.zeros(8, 4, 20, dtype=torch.int64)),
        ("k", torch.zeros(8, 3, 12)),
        ("k", torch.zeros(8, 1, 12, dtype=torch.bfloat16)),
        ("q", torch.zeros(8, 1, 13)),
        ("log_decay", torch.zeros(8, 4)),
        ("log_decay", torch.zeros(4, 1, 1)),
        ("log_decay", torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_a_bad_input_is_named(name: str, bad: Tensor) -> None:
    given = replace(tokens(8, dtype=torch.float32), **{name: bad})
    with pytest.raises(ValueError, match=rf"\b{name}\b.*expected"):
        given.prefill((8,))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*expected"):
        simple_decay.decode(**vars(given), states=StateSlots(initial_states(8), torch.arange(8)))


@pytest.mark.parametrize("states", [initial_states(8)[:, :3], initial_states(8).mT])
def test_a_pool_of_other_states_is_refused(states: Tensor) -> None:
    """The pools of the delta rules hold (value_dim, key_dim); this one holds (key_dim, value_dim)."""
    with pytest.raises(ValueError, match="a slot of pool holds"):
        tokens(8).prefill((8,), states=StateSlots(states, torch.tensor([0])))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("k", torch.zeros(70, 12)),
        ("k", torch.zeros(69, 1, 12)),
        ("v", torch.zeros(70, 4, 20, dtype=torch.int32)),
        ("log_decay", torch.zeros(3)),
        ("chunk_states", torch.zeros(2, 4, 20, 12)),
        ("chunk_states has 1 rows", torch.zeros(1, 4, 12, 20)),
        ("chunk_states has 0 rows", None),
        ("initial_states", torch.zeros(1, 4, 12, 21)),
        ("pool", torch.zeros(3, 4, 20, 12)),
        ("slot 2 is outside the pool", torch.zeros(2, 4, 12, 20)),
    ],
)
def test_a_bad_checkpoint_is_named_and_writes_nothing(name: str, bad: Tensor | None) -> None:
    given = {
        "k": torch.zeros(70, 1, 12),
        "v": torch.zeros(70, 4, 20),
        "log_decay": torch.zeros(4),
        "chunk_states": torch.zeros(2, 4, 12, 20),
        "initial_states": torch.zeros(1, 4, 12, 20),
        "pool": torch.full((3, 4, 12, 20), torch.nan),
    }
    pool = given["pool"]
    given["pool" if "slot" in name else name.split()[0]] = bad  # type: ignore[assignment]
    spans: Spans = spans_per_sequence(Checkpoints([0], [70], [2]), (70,), 64, "cpu")
    with pytest.raises(ValueError, match=rf"\b{name}\b.*expected"):
        simple_decay.checkpoint(**given, spans=spans)
    assert pool.isnan().all()


def test_a_sequence_without_its_initial_state_is_named() -> None:
    spans = spans_from_start(Checkpoints([1], [3], [0]), (5, 5), "cpu")
    operands = (torch.zeros(10, 1, 12), torch.zeros(10, 4, 20), torch.zeros(4), None)
    with pytest.raises(ValueError, match="initial_states has 1 rows: expected 2"):
        simple_decay.checkpoint(
            *operands, spans=spans, pool=torch.zeros(1, 4, 12, 20), initial_states=torch.zeros(1, 4, 12, 20)
        )
