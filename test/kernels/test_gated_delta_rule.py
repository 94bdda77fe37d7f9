"""States of the gated delta rule at any token are the recurrence's, and bad operands are named.

What it has in common with other operators: `test_operators.py`.
"""

from dataclasses import replace

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

from .batch import RAGGED, assert_close, pool_of, sequences
from .operators import GatedDeltaRuleTokens, initial_states, no_state
from .operators import gated_delta_rule_tokens as tokens


def test_a_chunk_state_and_the_corrected_values_give_the_state_at_any_token() -> None:
    chunk_size, length = 16, 40
    given = tokens(length)
    _, states = given.expected(no_state())
    result = given.prefill((length,), chunk_size=chunk_size)
    keys = given.k.repeat_interleave(given.v.shape[1] // given.k.shape[1], 1)
    for position in range(length + 1):
        chunk = min(position, length - 1) // chunk_size
        since = slice(chunk * chunk_size, position)
        decay_to_end = (given.g[since].sum(0) - given.g[since].cumsum(0)).exp()
        written = torch.einsum("th,thv,thk->hvk", decay_to_end, result.corrected_values[since], keys[since])
        kept = given.g[since].sum(0).exp()[:, None, None] * result.chunk_states[chunk]
        assert_close(kept + written, states[position], torch.float64)


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
        given.decode(StateSlots(initial_states(8), torch.arange(8)))


def advanced(
    given: GatedDeltaRuleTokens, where: Checkpoints, starts: Tensor | None, rows: str, chunk_size: int = 16
) -> Tensor:
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
            _, states = given[own].expected(starts[sequence])
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
