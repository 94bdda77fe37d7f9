"""Positions at which states are kept while a batch is prefilled, and the tokens that lead to each.

The state at position p of a sequence has taken in the first p tokens that this prefill gives it. A prefill holds the
state before every chunk, so an operator starts from the chunk that position p ends in and takes in what remains, at
most `chunk_size` tokens:

    sequence   |--- chunk 0 ---|--- chunk 1 ---|-- ..          `chunks`  the row of the state that it starts from
                               start ====== p                  `starts`, `ends`  the tokens of the batch in between

Position 0 is the initial state. Where the grid of chunks lies over the batch (Mamba2), a sequence begins anywhere in a
chunk: what ends in that chunk starts from the sequence's initial state, and its row is `NO_CHUNK`. Likewise where rows
are the states after whole chunks, for what ends in a sequence's first, and where a prefill keeps a more exact copy of
one chunk state a sequence, for what starts from it.

All is made on the host, once for a batch, and serves every layer: a launch reads five short vectors of int64, so that
addresses are 64 bits wide whatever the size of a pool. Positions are checked here, before any launch. Spans of several
operators are made on the host and reach a device in one copy (`moved`, `Spans.on`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

NO_CHUNK = -1
"""No row of the chunk states: the span starts from a state of its sequence, the initial one or a snapshot."""


def tensor_on(values: Sequence[Any], device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make a tensor of numbers on `device`; a copy to CUDA is from pinned memory, and the host does not wait for it."""
    is_pinned = torch.device(device).type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=is_pinned).to(device, non_blocking=True)


def moved(vectors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Copy vectors (n,) int64 of the host to `device` in one piece, each at a multiple of 16 bytes.

    A copy to CUDA is from pinned memory, and the host does not wait for it: PyTorch gives that memory to no other
    before the copy is made, however early it is let go (`CachingHostAllocator`).
    """
    pieces = [piece for each in vectors for piece in ((each, each.new_zeros(1)) if each.shape[0] % 2 else (each,))]
    sizes = [piece.shape[0] for piece in pieces]
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=torch.device(device).type == "cuda")
    on_device = torch.cat(pieces, out=packed).to(device, non_blocking=True).split_with_sizes(sizes)
    starts = accumulate((1 + each.shape[0] % 2 for each in vectors), initial=0)
    return [on_device[start] for start, _ in zip(starts, vectors, strict=False)]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """States to keep: `slots[i]` gets the state of sequence `sequences[i]` at `positions[i]`.

    `slots` are ints, or (n,) int32 or int64 where only the device knows them. Slots are distinct; the same position may
    be kept twice.
    """

    sequences: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int] | Tensor

    def __post_init__(self) -> None:
        """Raise ValueError unless there are as many of each."""
        lengths = len(self.sequences), len(self.positions), len(self.slots)
        if len(set(lengths)) > 1:
            raise ValueError(f"sequences, positions and slots must be equally many, got {lengths}")


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """From which state, through which tokens, to which slot; each (num_checkpoints,) int64 on the device.

    `chunks` is a row of the chunk states, or `NO_CHUNK`. Tokens `starts` up to, not including, `ends` of the batch are
    taken in. `max_tokens` is the longest span. The host knows besides that the batch has `num_tokens` in
    `num_sequences`, that `chunks` reach row `num_chunks` - 1, and whether any is `NO_CHUNK`.
    """

    sequences: Tensor
    chunks: Tensor
    starts: Tensor
    ends: Tensor
    slots: Tensor
    max_tokens: int
    num_tokens: int = 0
    num_sequences: int = 0
    num_chunks: int = 0
    has_no_chunk: bool = False

    def __len__(self) -> int:
        """Number of checkpoints."""
        return self.slots.shape[0]

    def on(self, vectors: Sequence[Tensor], slots: Tensor) -> "Spans":
        """These spans with `vectors`, which are its `sequences`, `chunks`, `starts` and `ends`, and `slots`."""
        sequences, chunks, starts, ends = vectors
        return replace(self, sequences=sequences, chunks=chunks, starts=starts, ends=ends, slots=slots)

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The vectors that a kernel reads: `sequences`, `chunks`, `starts`, `ends` and `slots`."""
        return self.sequences, self.chunks, self.starts, self.ends, self.slots

    def rows(self) -> list[tuple[int, ...]]:
        """List the columns of each span as numbers of the host: `sequence`, `chunk`, `start`, `end` and `slot`."""
        return [*zip(*(column.tolist() for column in self.columns), strict=True)]

    def tokens(self) -> tuple[Tensor, Tensor]:
        """List the tokens of each span, (num_checkpoints, max_tokens) int64, 0 behind its end, and which are tokens."""
        tokens = self.starts[:, None] + torch.arange(self.max_tokens, device=self.starts.device)
        is_token = tokens < self.ends[:, None]
        return torch.where(is_token, tokens, 0), is_token

    def gather(self, dtype: torch.dtype, *values: Tensor) -> list[Tensor]:
        """Take values (num_tokens, ...) of each span: (num_checkpoints, max_tokens, ...), zero behind its end."""
        tokens, is_token = self.tokens()
        return [torch.where(_like(is_token, each.dim() + 1), each[tokens].to(dtype), 0) for each in values]

    def at_end(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Take values (num_tokens, ...) of each span's last token: (num_checkpoints, ...), zero without one."""
        last = values[(self.ends - 1).clamp(0)].to(dtype)
        return torch.where(_like(self.ends > self.starts, values.dim()), last, 0)

    def decay_to_end(self, sums: Tensor, at_end: Tensor) -> Tensor:
        """Compute exp(at_end - sums) for each token of each span, zero behind its end.

        `sums` of log decays are (num_checkpoints, max_tokens, ...), `at_end` (num_checkpoints, ...).
        """
        _, is_token = self.tokens()
        # Masked before exp: behind the span the difference is positive and may overflow.
        return (at_end[:, None] - sums).masked_fill(~_like(is_token, sums.dim()), -torch.inf).exp()

    def start_states(
        self, chunk_states: Tensor | None, initial_states: Tensor | None, state_shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Take the state that each span starts from: of a chunk, else of its sequence, else zero."""
        states = torch.zeros(len(self), *state_shape, dtype=dtype, device=self.slots.device)
        has_chunk = self.chunks != NO_CHUNK
        if chunk_states is not None:
            states[has_chunk] = chunk_states[self.chunks[has_chunk]].to(dtype)
        if initial_states is not None:
            states[~has_chunk] = initial_states[self.sequences[~has_chunk]].to(dtype)
        return states

    def require_batch(self, num_tokens: int, pool: Tensor) -> None:
        """Raise ValueError for a batch of other tokens than the spans', or a slot outside `pool` (num_slots, ...).

        Slots on a device are its allocator's word, as reading them would wait for it; a kernel writes nothing for one
        outside the pool.
        """
        if num_tokens < self.num_tokens:
            raise ValueError(f"the batch must have the {self.num_tokens} tokens of the spans, got {num_tokens}")
        if self.slots.device.type == "cpu":
            for slot in self.slots.tolist():
                if not 0 <= slot < pool.shape[0]:
                    raise ValueError(f"a slot must be 0 to {pool.shape[0] - 1}, inside the pool, got {slot}")

    def require_sequences(self, name: str, num_rows: int) -> None:
        """Raise ValueError unless `name`, of `num_rows`, has a row for each sequence of the batch."""
        if num_rows < self.num_sequences:
            raise ValueError(f"{name} must have {self.num_sequences} rows, one a sequence, got {num_rows}")

    def require_chunk_states(self, chunk_states: Tensor | None) -> None:
        """Raise ValueError unless `chunk_states` (num_chunks, ...) has the rows that spans start from."""
        num_rows = 0 if chunk_states is None else chunk_states.shape[0]
        if num_rows < self.num_chunks:
            raise ValueError(f"chunk_states must have the {self.num_chunks} rows of the spans or more, got {num_rows}")

    def require_chunks(self) -> None:
        """Raise ValueError for a span that starts from no chunk, where an operator takes no initial states."""
        if self.has_no_chunk:
            raise ValueError("every span must start from a chunk of its sequence's own grid, got one without a chunk")


def last_chunks(checkpoints: Checkpoints, num_sequences: int, chunk_size: int) -> list[int]:
    """List for each sequence the chunk of its own that its last position ends in, `NO_CHUNK` without a position."""
    chunks = [NO_CHUNK] * num_sequences
    for sequence, position in zip(checkpoints.sequences, checkpoints.positions, strict=True):
        chunks[sequence] = max(chunks[sequence], _chunk_of(position, chunk_size))
    return chunks


def spans_per_sequence(
    checkpoints: Checkpoints,
    lengths: Sequence[int],
    chunk_size: int,
    device: torch.device | str,
    snapshots: Sequence[int] = (),
) -> Spans:
    """Spans on a grid of each sequence's own: sequence i has ceil(lengths[i] / chunk_size) rows, one after the other.

    With `snapshots`, what ends in chunk snapshots[i] of sequence i starts from `NO_CHUNK`, its sequence's snapshot.

    Raises ValueError for a sequence outside the batch, a position outside its sequence, any of an empty sequence, which
    has no row, and a chunk below one token.
    """
    rows = [0, *accumulate(-(-length // max(chunk_size, 1)) for length in lengths)]

    def of(sequence: int, first: int, position: int) -> tuple[int, int]:
        if not lengths[sequence]:
            raise ValueError(f"sequence {sequence} must have a token, to have a chunk, got an empty one")
        chunk = _chunk_of(position, chunk_size)
        has_snapshot = bool(snapshots) and snapshots[sequence] == chunk
        return NO_CHUNK if has_snapshot else rows[sequence] + chunk, first + chunk * chunk_size

    return _spans(checkpoints, lengths, chunk_size, device, of)


def spans_over_batch(
    checkpoints: Checkpoints, lengths: Sequence[int], chunk_size: int, device: torch.device | str
) -> Spans:
    """Spans on one grid over the whole batch: row c is the state before token c * chunk_size of the batch.

    A sequence that begins with its chunk starts from its initial state too: what SGLang's scan leaves in that row is
    where the sequence before it ended.

    Raises ValueError for a sequence outside the batch, a position outside its sequence and a chunk below one token.
    """

    def of(_: int, first: int, position: int) -> tuple[int, int]:
        chunk = max(first + position - 1, 0) // chunk_size
        start = chunk * chunk_size
        return (chunk, start) if first < start else (NO_CHUNK, first)

    return _spans(checkpoints, lengths, chunk_size, device, of)


def spans_after_chunks(
    checkpoints: Checkpoints, lengths: Sequence[int], chunk_size: int, device: torch.device | str
) -> Spans:
    """Spans on a grid of each sequence's own whose rows are the states *after* its whole chunks.

    Sequence i has lengths[i] // chunk_size rows, one after the other; row r of them is its state after (r + 1) *
    chunk_size tokens, and none is its initial state: what ends in the first chunk starts from `NO_CHUNK`. A position at
    the end of a chunk is that row, with no token to take in. Raises as `spans_over_batch`.
    """
    rows = [0, *accumulate(length // max(chunk_size, 1) for length in lengths)]

    def of(sequence: int, first: int, position: int) -> tuple[int, int]:
        whole = position // chunk_size
        return rows[sequence] + whole - 1 if whole else NO_CHUNK, first + whole * chunk_size

    return _spans(checkpoints, lengths, chunk_size, device, of)


def spans_from_start(checkpoints: Checkpoints, lengths: Sequence[int], device: torch.device | str) -> Spans:
    """Spans that start with their sequence, for an operator without chunk states; raises as `spans_over_batch`."""
    return _spans(checkpoints, lengths, 1, device, lambda _, first, __: (NO_CHUNK, first))


def _spans(
    checkpoints: Checkpoints,
    lengths: Sequence[int],
    chunk_size: int,
    device: torch.device | str,
    start_of: Callable[[int, int, int], tuple[int, int]],
) -> Spans:
    """`start_of` (sequence, its first token, position) gives the row and the token that a span starts at."""
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    first_tokens = [0, *accumulate(lengths)]
    columns: list[tuple[int, int, int, int]] = []
    for sequence, position in zip(checkpoints.sequences, checkpoints.positions, strict=True):
        if not 0 <= sequence < len(lengths):
            raise ValueError(f"a sequence must be 0 to {len(lengths) - 1}, inside the batch, got {sequence}")
        if not 0 <= position <= lengths[sequence]:
            raise ValueError(
                f"a position in sequence {sequence} must be 0 to {lengths[sequence]}, its length, got {position}"
            )
        chunk, start = start_of(sequence, first_tokens[sequence], position)
        columns.append((sequence, chunk, start, first_tokens[sequence] + position))
    # Rows start at multiples of 16 bytes: Triton compiles anew for one that does not.
    padded = [*columns, (0, 0, 0, 0)] if len(columns) % 2 else columns
    numbers = tensor_on([[column[row] for column in padded] for row in range(4)], device)
    slots = checkpoints.slots
    sequences, chunks, starts, ends = numbers[:, : len(columns)]
    return Spans(
        sequences,
        chunks,
        starts,
        ends,
        slots.to(device, torch.int64, non_blocking=True) if isinstance(slots, Tensor) else tensor_on(slots, device),
        max((end - start for _, _, start, end in columns), default=0),
        first_tokens[-1],
        len(lengths),
        max((chunk + 1 for _, chunk, _, _ in columns), default=0),
        any(chunk == NO_CHUNK for _, chunk, _, _ in columns),
    )


def _chunk_of(position: int, chunk_size: int) -> int:
    """Return the chunk of a sequence that `position` ends in, the first for 0."""
    return max(position - 1, 0) // chunk_size


def _like(mask: Tensor, num_dimensions: int) -> Tensor:
    """Return `mask` with axes of size 1 behind it."""
    return mask.reshape(*mask.shape, *(1,) * (num_dimensions - mask.dim()))
