"""Spans lead to each position from where the state before it is known."""

import pytest
import torch

from sgl_kernel_ext.checkpoints import NO_CHUNK, Checkpoints, Spans, spans_from_start, spans_over_batch

LENGTHS = (70, 58, 10)
"""The second sequence begins inside a chunk of 64, the third with one."""


def over_batch(sequence: int, position: int) -> tuple[int, ...]:
    spans = spans_over_batch(Checkpoints((sequence,), (position,), (0,)), LENGTHS, 64, "cpu")
    return tuple(int(column) for column in (spans.chunks, spans.starts, spans.ends))


@pytest.mark.parametrize(
    ("sequence", "position", "expected"),
    [
        (0, 0, (NO_CHUNK, 0, 0)),
        (0, 64, (NO_CHUNK, 0, 64)),
        (0, 65, (1, 64, 65)),
        (1, 0, (NO_CHUNK, 70, 70)),
        (1, 58, (NO_CHUNK, 70, 128)),
        (2, 0, (NO_CHUNK, 128, 128)),
        (2, 10, (NO_CHUNK, 128, 138)),
    ],
)
def test_a_sequence_starts_from_its_initial_state_and_later_chunks_from_their_row(
    sequence: int, position: int, expected: tuple[int, ...]
) -> None:
    assert over_batch(sequence, position) == expected


def test_without_chunks_every_span_starts_with_its_sequence() -> None:
    spans = spans_from_start(Checkpoints((1, 0), (58, 7), (4, 2)), LENGTHS, "cpu")
    assert (spans.starts.tolist(), spans.ends.tolist(), spans.max_tokens) == ([70, 0], [128, 7], 58)
    assert (spans.chunks == NO_CHUNK).all()


def test_a_sequence_without_a_row_is_named() -> None:
    spans: Spans = spans_from_start(Checkpoints((2,), (1,), (0,)), LENGTHS, "cpu")
    spans.require_sequences(3, "initial_states")
    with pytest.raises(ValueError, match="sequence 2 has no row in initial_states: expected more than 2 rows"):
        spans.require_sequences(2, "initial_states")


def test_nothing_to_keep_needs_no_rows() -> None:
    spans = spans_from_start(Checkpoints((), (), torch.tensor([])), LENGTHS, "cpu")
    spans.require_sequences(0, "initial_states")
    assert (len(spans), spans.max_tokens) == (0, 0)
