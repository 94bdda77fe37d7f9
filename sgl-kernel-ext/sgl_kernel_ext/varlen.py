"""A batch of sequences of any length, laid end to end along the token axis, and the chunks it is cut into.

`cu_seqlens` (num_sequences + 1,) holds the cumulative lengths: sequence i owns tokens cu_seqlens[i] up to, not
including, cu_seqlens[i + 1]; an empty sequence is allowed. A chunk is a run of at most `chunk_size` tokens of one
sequence. Inside a chunk an operator works on all tokens at once; from chunk to chunk it carries a state, so the only
loop runs over `steps`: the first chunks of all sequences together, then the second ones, and so on.

Two grids exist. `per_sequence` counts chunks from the start of each sequence. `over_batch` counts them from the start
of the batch, and cuts in addition where a sequence starts, so a chunk may be short at both ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from sgl_kernel_ext.arguments import INTEGERS, require


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The chunks that can be computed together: at most one of each sequence.

    `chunks` and `sequences` are (n,) int64, the chunk and the sequence that owns it.
    """

    chunks: Tensor
    sequences: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """Chunks of a batch, in the order of their tokens.

    All chunks have as many places as the longest one has tokens, at least one. `tokens` (num_chunks, num_places) int64
    is the token at each place and 0 where a chunk is short; `is_token`, of the same shape, tells which places are
    taken. `starts` (num_chunks,) int64 is the first token of each chunk.
    """

    starts: Tensor
    tokens: Tensor
    is_token: Tensor
    steps: tuple[Step, ...]

    def gather(self, values: Tensor) -> Tensor:
        """Lay values (num_tokens, ...) out as (num_chunks, num_places, ...), zero where a chunk is short."""
        taken = self.is_token.reshape(*self.is_token.shape, *(1,) * (values.dim() - 1))
        return torch.where(taken, values[self.tokens], 0)

    def scatter(self, values: Tensor, num_tokens: int) -> Tensor:
        """Lay values (num_chunks, num_places, ...) out as (num_tokens, ...)."""
        flat = values.new_zeros(num_tokens, *values.shape[2:])
        flat[self.tokens[self.is_token]] = values[self.is_token]
        return flat


def per_sequence(cu_seqlens: Tensor, chunk_size: int) -> Chunks:
    """Cut each sequence into chunks that count from its own start."""
    return _cut(cu_seqlens, chunk_size, lambda start, end: range(start, end, chunk_size))


def over_batch(cu_seqlens: Tensor, chunk_size: int) -> Chunks:
    """Cut the batch into chunks that count from its start, and where a sequence starts."""

    def starts(start: int, end: int) -> list[int]:
        next_on_grid = (start // chunk_size + 1) * chunk_size
        return [start, *range(next_on_grid, end, chunk_size)] if start < end else []

    return _cut(cu_seqlens, chunk_size, starts)


def require_cu_seqlens(cu_seqlens: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless `cu_seqlens` is (num_sequences + 1,), ascending, from 0 to `num_tokens`."""
    require("cu_seqlens", cu_seqlens, ("num_sequences + 1",), dtypes=INTEGERS)
    bounds = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
        raise ValueError(f"cu_seqlens must ascend from 0 to {num_tokens}, the number of tokens, got {bounds}")


def sequence_of_token(cu_seqlens: Tensor) -> Tensor:
    """Number the sequence that owns each token, (num_tokens,) int64."""
    lengths = cu_seqlens.diff().long()
    return torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)


def _cut(cu_seqlens: Tensor, chunk_size: int, starts_within: Callable[[int, int], Sequence[int]]) -> Chunks:
    """Cut each sequence (start, end) where `starts_within` says."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    bounds = cu_seqlens.tolist()
    starts: list[int] = []
    lengths: list[int] = []
    steps: list[tuple[list[int], list[int]]] = []
    for sequence, (first, end) in enumerate(pairwise(bounds)):
        for rank, (start, stop) in enumerate(pairwise([*starts_within(first, end), end])):
            if rank == len(steps):
                steps.append(([], []))
            steps[rank][0].append(len(starts))
            steps[rank][1].append(sequence)
            starts.append(start)
            lengths.append(stop - start)

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=cu_seqlens.device)

    places = torch.arange(max(lengths, default=1), device=cu_seqlens.device)
    is_token = places < on_device(lengths)[:, None]
    tokens = torch.where(is_token, on_device(starts)[:, None] + places, 0)
    return Chunks(
        on_device(starts),
        tokens,
        is_token,
        tuple(Step(on_device(chunks), on_device(sequences)) for chunks, sequences in steps),
    )
