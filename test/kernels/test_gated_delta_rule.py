"""The gated delta rule equals its recurrence, whatever the batch, and touches only its own states."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import gated_delta_rule
from sgl_kernel_ext.checkpoints import (
    Checkpoints,
    spans_after_chunks,
    spans_from_start,
    spans_over_batch,
    spans_per_sequence,
)
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
    g: Tensor
    beta: Tensor

    def __getitem__(self, index: slice) -> "Tokens":
        return Tokens(*(getattr(self, name)[index] for name in self.__dataclass_fields__))

    def prefill(self, lengths: tuple[int, ...], **options: object) -> gated_delta_rule.Prefill:
        return gated_delta_rule.prefill(**vars(self), cu_seqlens=cu_seqlens(lengths), **options)  # type: ignore[arg-type]

    def expected(self, state: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return recurrence.gated_delta_rule(**vars(self), scale=scale, state=state)


def tokens(num_tokens: int, shape: tuple[int, ...] = SHAPES[1], dtype: torch.dtype = torch.float64) -> Tokens:
    num_key_heads, num_value_heads, key_dim, value_dim = shape
    random = generator(1)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    return Tokens(
        q=normal(num_tokens, num_key_heads, key_dim).to(dtype),
        k=torch.nn.functional.normalize(normal(num_tokens, num_key_heads, key_dim), dim=-1).to(dtype),
        v=normal(num_tokens, num_value_heads, value_dim).to(dtype),
        # A memory of some forty tokens: a wrong state shows in every later output.
        g=-0.05 * torch.rand(num_tokens, num_value_heads, generator=random, dtype=torch.float64),
        beta=torch.rand(num_tokens, num_value_heads, generator=random, dtype=torch.float64),
    )


def initial_states(num_sequences: int, shape: tuple[int, ...] = SHAPES[1]) -> Tensor:
    _, num_value_heads, key_dim, value_dim = shape
    return torch.randn(num_sequences, num_value_heads, value_dim, key_dim, generator=generator(2), dtype=torch.float64)


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


def test_a_chunk_state_and_the_corrected_values_give_the_state_at_any_token() -> None:
    chunk_size, length = 16, 40
    given = tokens(length)
    _, states = given.expected(torch.zeros_like(initial_states(1)[0]), 1.0)
    result = given.prefill((length,), chunk_size=chunk_size)
    keys = given.k.repeat_interleave(given.v.shape[1] // given.k.shape[1], 1)
    for position in range(length + 1):
        chunk = min(position, length - 1) // chunk_size
        since = slice(chunk * chunk_size, position)
        decay_to_end = (given.g[since].sum(0) - given.g[since].cumsum(0)).exp()
        written = torch.einsum("th,thv,thk->hvk", decay_to_end, result.corrected_values[since], keys[since])
        kept = given.g[since].sum(0).exp()[:, None, None] * result.chunk_states[chunk]
        assert_close(kept + written, states[position], torch.float64)


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
    outputs = gated_delta_rule.decode(**vars(given), states=StateSlots(pool, slots), scale=SCALE)
    result = given.prefill((1,) * num_sequences, states=StateSlots(other, slots), scale=SCALE)
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
    given.v[RAGGED[0] + 1] = torch.nan
    pool, slots = pool_of(initial_states(len(RAGGED)))
    slots[2] = -1
    before = pool.clone()
    result = given.prefill(RAGGED, states=StateSlots(pool, slots))
    padding = slice(RAGGED[0], RAGGED[0] + RAGGED[2])
    assert (result.outputs[padding] == 0).all()
    assert not result.outputs.isnan().any()
    last = given[-1:]
    assert (gated_delta_rule.decode(**vars(last), states=StateSlots(pool, torch.tensor([-1]))) == 0).all()
    assert_only_changed(before, pool, slots)


def test_strong_decay_neither_overflows_nor_leaves_a_trace() -> None:
    given = tokens(200, dtype=torch.float32)
    given = replace(given, g=torch.full_like(given.g, -80.0))
    result = given.prefill((200,))
    outputs, _ = given.expected(torch.zeros_like(initial_states(1)[0]), SHAPES[1][2] ** -0.5)
    assert_close(result.outputs, outputs, torch.float32)


def test_a_state_is_rounded_to_the_dtype_of_its_pool() -> None:
    given = tokens(65, dtype=torch.bfloat16)
    pool, slots = pool_of(initial_states(1).bfloat16())
    result = given.prefill((65,), states=StateSlots(pool, slots))
    assert result.final_states.dtype == torch.float32
    assert torch.equal(pool[slots], result.final_states.bfloat16())


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("v", torch.zeros(8, 4)),
        ("v", torch.zeros(8, 4, 20, dtype=torch.int64)),
        ("k", torch.zeros(8, 3, 12)),
        ("k", torch.zeros(8, 1, 12, dtype=torch.bfloat16)),
        ("q", torch.zeros(8, 1, 13)),
        ("g", torch.zeros(8, 5)),
        ("beta", torch.zeros(8, 4, dtype=torch.int64)),
    ],
)
def test_a_bad_input_is_named(name: str, bad: Tensor) -> None:
    given = replace(tokens(8, dtype=torch.float32), **{name: bad})
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        given.prefill((8,))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        gated_delta_rule.decode(**vars(given), states=StateSlots(initial_states(8), torch.arange(8)))


@pytest.mark.parametrize("states", [initial_states(8)[:, :3], initial_states(8).mT])
def test_a_pool_of_other_states_is_refused(states: Tensor) -> None:
    with pytest.raises(ValueError, match="a slot of pool must hold"):
        tokens(8).prefill((8,), states=StateSlots(states, torch.tensor([0])))


def advanced(given: Tokens, where: Checkpoints, starts: Tensor | None, rows: str, chunk_size: int = 16) -> Tensor:
    """The states at `where` by `advance`, from the states before or after the chunks of a batch, or from its start."""
    pool, slots = pool_of(torch.zeros_like(initial_states(len(RAGGED))) if starts is None else starts)
    made = given.prefill(RAGGED, states=StateSlots(pool, slots), chunk_size=chunk_size)
    kept = torch.full((len(where.slots), *pool.shape[1:]), torch.nan, dtype=made.chunk_states.dtype)
    chunk_states: Tensor | None = made.chunk_states
    if rows == "before":
        spans = spans_per_sequence(where, RAGGED, chunk_size, "cpu")
    elif rows == "after":
        spans = spans_after_chunks(where, RAGGED, chunk_size, "cpu")
        at_ends = [[*made.chunk_states[of], made.final_states[i]] for i, of in chunk_rows(chunk_size)]
        # The state after a chunk that is not whole is none of the rows.
        whole = [each[1 : 1 + RAGGED[i] // chunk_size] for i, each in enumerate(at_ends)]
        chunk_states = torch.stack([state for each in whole for state in each])
    else:
        spans, chunk_states = spans_from_start(where, RAGGED, "cpu"), None
    operands = (given.k, given.v, given.g, given.beta, chunk_states)
    gated_delta_rule.advance(*operands, spans=spans, pool=kept, initial_states=starts)
    return kept


def chunk_rows(chunk_size: int) -> list[tuple[int, slice]]:
    return list(sequences(tuple(-(-length // chunk_size) for length in RAGGED)))


@pytest.mark.parametrize("with_initial_states", [True, False])
@pytest.mark.parametrize("rows", ["before", "after", "none"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_state_advanced_to_any_token_is_the_recurrence(
    dtype: torch.dtype, rows: str, with_initial_states: bool
) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED))
    if not with_initial_states:
        starts.zero_()
    for sequence, own in sequences(RAGGED):
        length = RAGGED[sequence]
        if length or rows != "before":
            where = Checkpoints([sequence] * (length + 1), range(length + 1), range(length + 1))
            _, states = given[own].expected(starts[sequence], 1.0)
            assert_close(advanced(given, where, starts if with_initial_states else None, rows), states, dtype)


def test_a_chunk_state_of_another_grid_is_seen() -> None:
    """Negative control: rows after chunks, taken for rows before them, give other states."""
    given, starts = tokens(sum(RAGGED)), initial_states(len(RAGGED))
    made = given.prefill(RAGGED, chunk_size=16)
    where = Checkpoints([2, 2], [40, 70], [0, 1])
    kept = torch.full((2, *starts.shape[1:]), torch.nan, dtype=torch.float64)
    spans = spans_after_chunks(where, RAGGED, 16, "cpu")
    operands = (given.k, given.v, given.g, given.beta, made.chunk_states)
    gated_delta_rule.advance(*operands, spans=spans, pool=kept)
    with pytest.raises(AssertionError):
        assert_close(kept, advanced(given, where, None, "after"), torch.float64)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("k", torch.zeros(70, 12)),
        ("v", torch.zeros(69, 4, 20)),
        ("v", torch.zeros(70, 4, 20, dtype=torch.int32)),
        ("g", torch.zeros(70, 3)),
        ("beta", torch.zeros(70, 4, dtype=torch.int64)),
        ("chunk_states", torch.zeros(1, 4, 12, 20)),
        ("chunk_states must have the 1 rows", None),
        ("initial_states", torch.zeros(1, 4, 20, 13)),
        ("initial_states must have 1 rows", torch.zeros(0, 4, 20, 12)),
        ("pool", torch.zeros(3, 4, 20)),
        ("a slot must be 0 to 1", torch.zeros(2, 4, 20, 12)),
    ],
)
def test_what_cannot_be_advanced_is_named_and_writes_nothing(name: str, bad: Tensor | None) -> None:
    given = {
        "k": torch.zeros(70, 1, 12),
        "v": torch.zeros(70, 4, 20),
        "g": torch.zeros(70, 4),
        "beta": torch.zeros(70, 4),
        "chunk_states": torch.zeros(1, 4, 20, 12),
        "initial_states": torch.zeros(1, 4, 20, 12),
        "pool": torch.full((3, 4, 20, 12), torch.nan),
    }
    pool = given["pool"]
    given["pool" if "slot" in name else name.split()[0]] = bad  # type: ignore[assignment]
    spans = spans_after_chunks(Checkpoints([0], [70], [2]), (70,), 64, "cpu")
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        gated_delta_rule.advance(**given, spans=spans)
    assert pool.isnan().all()


def test_a_checkpoint_takes_spans_of_its_own_batch_and_grid_only() -> None:
    operands = (torch.zeros(70, 1, 12), torch.zeros(70, 4, 20), torch.zeros(70, 4), torch.zeros(2, 4, 20, 12))
    pool = torch.zeros(3, 4, 20, 12)
    longer = spans_per_sequence(Checkpoints([0], [60], [2]), (71,), 64, "cpu")
    with pytest.raises(ValueError, match="must have the 71 tokens of the spans, got 70"):
        gated_delta_rule.checkpoint(*operands, spans=longer, pool=pool)
    finer = spans_per_sequence(Checkpoints([0], [70], [2]), (70,), 16, "cpu")
    with pytest.raises(ValueError, match="chunk_states must have the 5 rows of the spans or more, got 2"):
        gated_delta_rule.checkpoint(*operands, spans=finer, pool=pool)
    of_batch = spans_over_batch(Checkpoints([1], [2], [2]), (60, 10), 64, "cpu")
    with pytest.raises(ValueError, match="every span must start from a chunk"):
        gated_delta_rule.checkpoint(*operands, spans=of_batch, pool=pool)
