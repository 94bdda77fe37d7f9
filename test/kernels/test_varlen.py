"""The chunks of a batch cover its tokens once, in an order in which states can be carried."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import varlen
from sgl_kernel_ext.state_pool import StateSlots

from .batch import RAGGED, cu_seqlens

Grid = Callable[[Tensor, int], varlen.Chunks]

GRIDS = (varlen.per_sequence, varlen.over_batch)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000])
@pytest.mark.parametrize("lengths", [RAGGED, (), (0,), (0, 0, 3)])
def test_gathered_chunks_scatter_back_to_the_tokens(grid: Grid, chunk_size: int, lengths: tuple[int, ...]) -> None:
    values = torch.arange(1.0, 1 + 2 * sum(lengths)).reshape(-1, 2)
    chunks = grid(cu_seqlens(lengths), chunk_size)
    gathered = chunks.gather(values)
    assert torch.equal(chunks.scatter(gathered, sum(lengths)), values)
    assert (gathered[~chunks.is_token] == 0).all()
    assert int(chunks.is_token.sum()) == sum(lengths)


@pytest.mark.parametrize("grid", GRIDS)
def test_steps_take_every_chunk_once_and_each_sequence_in_order(grid: Grid) -> None:
    bounds = cu_seqlens(RAGGED)
    chunks = grid(bounds, 16)
    last_start: dict[int, int] = {}
    taken = []
    for step in chunks.steps:
        assert len(set(step.sequences.tolist())) == len(step.sequences)
        for chunk, sequence in zip(step.chunks.tolist(), step.sequences.tolist(), strict=True):
            start = int(chunks.starts[chunk])
            assert bounds[sequence] <= start < bounds[sequence + 1]
            assert start > last_start.get(sequence, -1)
            last_start[sequence] = start
            taken.append(chunk)
    assert sorted(taken) == list(range(len(chunks.starts)))


def test_a_grid_counts_from_each_sequence_or_from_the_batch() -> None:
    lengths = cu_seqlens((20, 20))
    assert varlen.per_sequence(lengths, 16).starts.tolist() == [0, 16, 20, 36]
    assert varlen.over_batch(lengths, 16).starts.tolist() == [0, 16, 20, 32]


@pytest.mark.parametrize("bad", [[0, 3], [1, 4], [0, 3, 2, 4], [[0, 4]], [0.0, 4.0], []])
def test_bad_lengths_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match=r"cu_seqlens must .* got"):
        varlen.require_cu_seqlens(torch.tensor(bad), 4)


def test_a_chunk_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        varlen.per_sequence(cu_seqlens((4,)), 0)


@pytest.mark.parametrize(
    ("name", "pool", "slots", "has_initial_state"),
    [
        ("pool", torch.zeros(3), torch.zeros(2, dtype=torch.int64), None),
        ("pool", torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), None),
        ("slots", torch.zeros(3, 2), torch.zeros(2), None),
        ("slots", torch.zeros(3, 2), torch.zeros(2, 1, dtype=torch.int64), None),
        ("has_initial_state", torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), torch.zeros(2)),
        ("has_initial_state", torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)),
    ],
)
def test_bad_state_slots_are_named(name: str, pool: Tensor, slots: Tensor, has_initial_state: Tensor | None) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must"):
        StateSlots(pool, slots, has_initial_state)


def test_as_many_slots_as_sequences_are_required() -> None:
    with pytest.raises(ValueError, match="slots must be 3, one a sequence, got 2"):
        StateSlots(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64)).require(3, (2,))
