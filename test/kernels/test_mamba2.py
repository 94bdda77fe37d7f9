"""States of Mamba2 at any token are the recurrence's, and bad operands are named.

What it has in common with other operators: `test_operators.py`.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import mamba2
from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_from_start, spans_over_batch
from sgl_kernel_ext.state_pool import StateSlots

from .batch import MAX_ERROR, RAGGED, assert_close, assert_only_changed, pool_of, sequences
from .operators import CHUNK_SIZE, Mamba2Tokens, initial_states, no_state
from .operators import mamba2_tokens as tokens


def test_chunks_start_on_the_grid_of_the_batch_and_at_every_sequence() -> None:
    starts = tokens(sum(RAGGED)).prefill(RAGGED).chunk_starts
    assert starts.tolist() == [0, 64, 65, 128, 192, 195]


def test_a_chunk_state_and_the_inputs_give_the_state_at_any_token() -> None:
    chunk_size, length = 16, 40
    given = tokens(length)
    _, states = given.expected(no_state())
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
        given.decode(StateSlots(initial_states(8), torch.arange(8)))


def everywhere(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length + 1)]


def take(
    given: Mamba2Tokens, result: mamba2.Prefill, starts: Tensor | None, chunk_size: int, spans: Spans, pool: Tensor
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
