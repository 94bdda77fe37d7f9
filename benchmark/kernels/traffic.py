"""The bytes of checkpoint launches: those that must move, and those that the kernels' programs load and store.

    must    each chunk state and operand that some position needs, once; each state and window, written once
    moved   a program makes one tile of one head's state, and loads for it what the tile needs: values along the rows
            are loaded by every tile of columns, keys by every tile of rows and by every head that shares them

What is loaded more than once comes from a cache after the first time, so `moved` bounds the traffic of the memory from
above.
"""

from dataclasses import dataclass

from torch import Tensor

from sgl_kernel_ext.checkpoints import NO_CHUNK, Spans

from .operands import Along, Operands

TILE = 64
"""Rows and columns of a head's state that one program makes, where it has as many."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a launch."""

    must_bytes: int
    moved_bytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.must_bytes + other.must_bytes, self.moved_bytes + other.moved_bytes)


def of_states(operands: Operands, spans: Spans, pool: Tensor) -> Traffic:
    """Count the bytes of the launch that writes the states of `spans` to `pool`."""
    num_heads, num_rows, num_columns = pool.shape[1:]
    row_tiles, column_tiles = -(-num_rows // TILE), -(-num_columns // TILE)
    loads = {Along.ROWS: column_tiles, Along.COLUMNS: row_tiles, Along.NEITHER: row_tiles * column_tiles}
    must_token = sum(stream.token_bytes for stream in operands.streams)
    moved_token = sum(
        num_heads * stream.width * stream.element_bytes * loads[stream.along] for stream in operands.streams
    )
    elements = pool[0].numel()
    read, written = elements * operands.chunk_states.element_size(), elements * pool.element_size()

    columns = (spans.sequences, spans.chunks, spans.starts, spans.ends)
    kept = list(zip(*(each.tolist() for each in columns), strict=True))
    # Positions of one chunk share its state, and the tokens up to the first of them.
    last: dict[tuple[int, int, int], int] = {}
    for sequence, chunk, start, end in kept:
        last[sequence, chunk, start] = max(end, last.get((sequence, chunk, start), start))
    must = moved = len(kept) * written
    for (_, chunk, start), end in last.items():
        must += (end - start) * must_token + (0 if chunk == NO_CHUNK else read)
    for _, chunk, start, end in kept:
        moved += (end - start) * moved_token + (0 if chunk == NO_CHUNK else read)
    return Traffic(must, moved)


def of_windows(num_windows: int, inputs: Tensor, pool: Tensor) -> Traffic:
    """Count the bytes of the launch that copies windows of `inputs` (num_tokens, num_channels) to `pool`."""
    moved = num_windows * pool[0].numel() * (inputs.element_size() + pool.element_size())
    return Traffic(moved, moved)
