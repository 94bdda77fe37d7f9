"""Spans lead from a state that a prefill leaves to every checkpoint, on every grid of chunks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sgl_kernel_ext.checkpoints import (
    NO_CHUNK,
    Checkpoints,
    Spans,
    last_chunks,
    moved,
    spans_after_chunks,
    spans_from_start,
    spans_over_batch,
    spans_per_sequence,
)

State = tuple[int, int]
"""A sequence, and how many of its tokens it has taken in."""
OF_NO_USE = (-1, 0)


def walk(lengths: Sequence[int]) -> Iterator[tuple[int, State]]:
    """Token by token: its place in the batch, and the state before it."""
    token = 0
    for sequence, length in enumerate(lengths):
        for taken in range(length):
            yield token, (sequence, taken)
            token += 1


def rows_per_sequence(lengths: Sequence[int], chunk_size: int) -> list[State]:
    return [state for _, state in walk(lengths) if state[1] % chunk_size == 0]


def rows_over_batch(lengths: Sequence[int], chunk_size: int) -> list[State]:
    """Before the first token of a sequence SGLang's scan leaves what the sequence before it ended with."""
    return [state if state[1] else OF_NO_USE for token, state in walk(lengths) if token % chunk_size == 0]


def rows_after_chunks(lengths: Sequence[int], chunk_size: int) -> list[State]:
    return [(sequence, taken + 1) for _, (sequence, taken) in walk(lengths) if (taken + 1) % chunk_size == 0]


@dataclass(frozen=True)
class Grid:
    """How spans are made, and by brute force the states that their rows hold."""

    spans: Callable[[Checkpoints, Sequence[int], int, str], Spans]
    rows: Callable[[Sequence[int], int], list[State]]


GRIDS = {
    "per sequence": Grid(spans_per_sequence, rows_per_sequence),
    "over the batch": Grid(spans_over_batch, rows_over_batch),
    "after chunks": Grid(spans_after_chunks, rows_after_chunks),
    "from the start": Grid(
        lambda checkpoints, lengths, _, device: spans_from_start(checkpoints, lengths, device), lambda *_: []
    ),
}

batches = st.lists(st.integers(0, 40), min_size=1, max_size=6)
chunk_sizes = st.integers(1, 20)


def everywhere(lengths: Sequence[int], *, with_empty: bool) -> Checkpoints:
    """Every position of every sequence."""
    where = [(i, p) for i, n in enumerate(lengths) if n or with_empty for p in range(n + 1)]
    return Checkpoints([i for i, _ in where], [p for _, p in where], range(len(where)))


@pytest.mark.parametrize("name", GRIDS)
@given(lengths=batches, chunk_size=chunk_sizes)
def test_a_row_and_the_tokens_of_the_span_are_the_state(name: str, lengths: list[int], chunk_size: int) -> None:
    grid = GRIDS[name]
    where = everywhere(lengths, with_empty=name != "per sequence")
    spans, rows = grid.spans(where, lengths, chunk_size, "cpu"), grid.rows(lengths, chunk_size)
    before = dict(walk(lengths))
    columns = (spans.sequences, spans.chunks, spans.starts, spans.ends, spans.slots)
    for number, (sequence, chunk, start, end, slot) in enumerate(
        zip(*(each.tolist() for each in columns), strict=True)
    ):
        assert (sequence, slot) == (where.sequences[number], number)
        state = (sequence, 0) if chunk == NO_CHUNK else rows[chunk]
        for token in range(start, end):
            assert before[token] == state, "a token that does not follow"
            state = (sequence, state[1] + 1)
        assert state == (sequence, where.positions[number])


@pytest.mark.parametrize("name", GRIDS)
@given(lengths=batches, chunk_size=chunk_sizes)
def test_no_row_lies_nearer_to_the_position(name: str, lengths: list[int], chunk_size: int) -> None:
    """Where rows are states before chunks, the position lies behind the start of its own, unless it is the first."""
    grid = GRIDS[name]
    where = everywhere(lengths, with_empty=name != "per sequence")
    spans, rows = grid.spans(where, lengths, chunk_size, "cpu"), grid.rows(lengths, chunk_size)
    for number, taken_in in enumerate((spans.ends - spans.starts).tolist()):
        sequence, position = where.sequences[number], where.positions[number]
        own = [taken for of, taken in rows if of == sequence]
        reaches = position if name == "after chunks" or not position else position - 1
        assert taken_in == position - max((taken for taken in own if taken <= reaches), default=0)
    assert spans.max_tokens == max((spans.ends - spans.starts).tolist(), default=0)
    if name != "from the start":
        assert spans.max_tokens <= chunk_size


@given(lengths=batches, chunk_size=chunk_sizes, data=st.data())
def test_with_snapshots_the_last_state_that_each_sequence_needs_is_one(
    lengths: list[int], chunk_size: int, data: st.DataObject
) -> None:
    """All else is as without: a snapshot is the state of the row that it stands for."""
    every = everywhere(lengths, with_empty=False)
    kept = [slot for slot in every.slots if data.draw(st.booleans())]
    where = Checkpoints([every.sequences[i] for i in kept], [every.positions[i] for i in kept], range(len(kept)))
    rows = rows_per_sequence(lengths, chunk_size)
    chunks = last_chunks(where, len(lengths), chunk_size)
    without = spans_per_sequence(where, lengths, chunk_size, "cpu")
    spans = spans_per_sequence(where, lengths, chunk_size, "cpu", chunks)
    started = [rows[chunk] for chunk in without.chunks.tolist()]
    copied = [max((state for state in started if state[0] == i), default=None) for i in range(len(lengths))]
    assert chunks == [NO_CHUNK if state is None else state[1] // chunk_size for state in copied]
    found = [
        copied[sequence] if chunk == NO_CHUNK else rows[chunk]
        for sequence, chunk in zip(where.sequences, spans.chunks.tolist(), strict=True)
    ]
    assert found == started
    assert [state in copied for state in started] == (spans.chunks == NO_CHUNK).tolist()
    for name in ("sequences", "starts", "ends", "slots"):
        assert torch.equal(getattr(spans, name), getattr(without, name))


@pytest.mark.parametrize("name", GRIDS)
@given(lengths=batches, chunk_size=chunk_sizes, data=st.data())
def test_what_the_host_knows_is_what_the_device_holds(
    name: str, lengths: list[int], chunk_size: int, data: st.DataObject
) -> None:
    all_of_them = everywhere(lengths, with_empty=name != "per sequence")
    numbers = (
        data.draw(st.lists(st.sampled_from(range(len(all_of_them.slots))), max_size=5)) if all_of_them.slots else []
    )
    where = Checkpoints(
        [all_of_them.sequences[i] for i in numbers],
        [all_of_them.positions[i] for i in numbers],
        torch.arange(len(numbers), dtype=torch.int32),
    )
    spans = GRIDS[name].spans(where, lengths, chunk_size, "cpu")
    assert len(spans) == len(numbers)
    assert all(each.dtype == torch.int64 for each in (spans.sequences, spans.chunks, spans.starts, spans.slots))
    chunks = spans.chunks.tolist()
    assert spans.has_no_chunk == (NO_CHUNK in chunks)
    assert spans.num_chunks == 1 + max(chunks, default=-1) <= len(GRIDS[name].rows(lengths, chunk_size))
    assert (spans.num_sequences, spans.num_tokens) == (len(lengths), sum(lengths))
    tokens, is_token = spans.tokens()
    assert tokens.shape == is_token.shape == (len(numbers), spans.max_tokens)
    for number in range(len(numbers)):
        start, end = spans.starts[number].item(), spans.ends[number].item()
        assert tokens[number][is_token[number]].tolist() == list(range(int(start), int(end)))
        assert (tokens[number][~is_token[number]] == 0).all()


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize(
    ("sequence", "position", "message"),
    [
        (-1, 0, "a sequence must be 0 to 1, inside the batch, got -1"),
        (2, 0, "a sequence must be 0 to 1, inside the batch, got 2"),
        (0, -1, "a position in sequence 0 must be 0 to 5, its length, got -1"),
        (0, 6, "a position in sequence 0 must be 0 to 5, its length, got 6"),
        (1, 1, "a position in sequence 1 must be 0 to 0, its length, got 1"),
    ],
)
def test_a_position_that_is_not_there_is_named(name: str, sequence: int, position: int, message: str) -> None:
    where = Checkpoints([0, sequence], [3, position], [0, 1])
    with pytest.raises(ValueError, match=message):
        GRIDS[name].spans(where, (5, 0), 4, "cpu")


@pytest.mark.parametrize("chunk_size", [0, -64])
@pytest.mark.parametrize("name", sorted(GRIDS.keys() - {"from the start"}))
def test_a_chunk_below_one_token_is_named(name: str, chunk_size: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_size must be at least 1, got {chunk_size}"):
        GRIDS[name].spans(Checkpoints([0], [3], [0]), (5,), chunk_size, "cpu")


def test_an_empty_sequence_has_no_chunk_to_start_from() -> None:
    where = Checkpoints([1], [0], [0])
    with pytest.raises(ValueError, match="sequence 1 must have a token, to have a chunk, got an empty one"):
        spans_per_sequence(where, (5, 0), 4, "cpu")
    for spans in (spans_over_batch(where, (5, 0), 4, "cpu"), spans_after_chunks(where, (5, 0), 4, "cpu")):
        assert (spans.has_no_chunk, spans.num_chunks, spans.max_tokens) == (True, 0, 0)


@pytest.mark.parametrize(
    ("sequences", "positions", "slots"), [([0], [1, 2], [0, 1]), ([0, 0], [1, 2], [0]), ([], [], [1])]
)
def test_counts_that_differ_are_named(sequences: list[int], positions: list[int], slots: list[int]) -> None:
    lengths = rf"\({len(sequences)}, {len(positions)}, {len(slots)}\)"
    with pytest.raises(ValueError, match=f"sequences, positions and slots must be equally many, got {lengths}"):
        Checkpoints(sequences, positions, slots)


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_outside_the_pool_is_named(slot: int) -> None:
    spans = spans_from_start(Checkpoints([0, 0], [1, 2], [2, slot]), (5,), "cpu")
    with pytest.raises(ValueError, match=f"a slot must be 0 to 2, inside the pool, got {slot}"):
        spans.require_batch(5, torch.zeros(3, 1))
    spans_from_start(Checkpoints([0, 0], [1, 2], [2, 0]), (5,), "cpu").require_batch(5, torch.zeros(3, 1))


def test_operands_of_another_batch_are_named() -> None:
    spans = spans_after_chunks(Checkpoints([0, 1], [3, 9], [0, 1]), (5, 9), 4, "cpu")
    spans.require_batch(14, torch.zeros(2, 1))
    with pytest.raises(ValueError, match="the batch must have the 14 tokens of the spans, got 13"):
        spans.require_batch(13, torch.zeros(2, 1))
    spans.require_chunk_states(torch.zeros(3, 1))
    with pytest.raises(ValueError, match="chunk_states must have the 3 rows of the spans or more, got 2"):
        spans.require_chunk_states(torch.zeros(2, 1))
    with pytest.raises(ValueError, match="chunk_states must have the 3 rows of the spans or more, got 0"):
        spans.require_chunk_states(None)
    spans.require_sequences("initial_states", 2)
    with pytest.raises(ValueError, match="initial_states must have 2 rows, one a sequence, got 1"):
        spans.require_sequences("initial_states", 1)
    with pytest.raises(ValueError, match=r"every span must start from a chunk .* got one without"):
        spans.require_chunks()
    spans_per_sequence(Checkpoints([0], [0], [0]), (5, 9), 4, "cpu").require_chunks()


def test_vectors_reach_a_device_together_each_where_a_tensor_of_its_own_might_begin() -> None:
    """On a device without memory."""
    vectors = [torch.arange(length) for length in (3, 0, 4, 1)]
    found = moved(vectors, "meta")
    assert [each.shape for each in found] == [each.shape for each in vectors]
    assert [each.storage_offset() for each in found] == [0, 4, 4, 8]
    assert len({each.untyped_storage()._cdata for each in found}) == 1
    assert all(each.device.type == "meta" for each in found)


def test_vectors_that_were_moved_have_their_numbers() -> None:
    vectors = [torch.arange(3) + 5, torch.arange(0), torch.arange(4), torch.arange(1) - 1]
    assert [each.tolist() for each in moved(vectors, "cpu")] == [[5, 6, 7], [], [0, 1, 2, 3], [-1]]
