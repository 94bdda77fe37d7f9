"""A batch of sequences and the positions at which states are kept in it, drawn from a seed.

Sequences of one batch differ by a few tokens each, as those of a server do: on Mamba2's flat grid of chunks only the
first one begins with a chunk.
"""

import random
from dataclasses import dataclass
from itertools import accumulate

import torch

from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_from_start, spans_over_batch, spans_per_sequence

from .shapes import Family, LayerShape

SEED = 1
STAGGER_TOKENS = 5
LEAST_TOKENS = 512
"""Tokens of two chunks of any model: a shorter sequence has no chunk-aligned position inside."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of `lengths` tokens: ours keeps states at `positions` of `sequences`, SGLang one at `aligned` of each.

    Slots of a pool: first the sequences' own, then ours, then SGLang's.
    """

    lengths: tuple[int, ...]
    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    aligned: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    @property
    def bounds(self) -> list[int]:
        """The first token of each sequence, and the end."""
        return [0, *accumulate(self.lengths)]

    @property
    def num_slots(self) -> int:
        """Slots of a pool that holds all states."""
        return 2 * len(self.lengths) + len(self.positions)

    @property
    def checkpoints(self) -> Checkpoints:
        """Our positions, with their slots."""
        first = len(self.lengths)
        return Checkpoints(self.sequences, self.positions, range(first, first + len(self.positions)))

    @property
    def aligned_slots(self) -> range:
        """SGLang's slots, one a sequence."""
        return range(self.num_slots - len(self.lengths), self.num_slots)


def batch_of(tokens: int, num_sequences: int, num_checkpoints: int, chunk_size: int, seed: int = SEED) -> Batch:
    """Draw sequences of `tokens` or a little less, positions at random, SGLang's at the start of the last chunk."""
    rng = random.Random(seed)  # noqa: S311 - positions, not a secret
    lengths = tuple(tokens - STAGGER_TOKENS * index for index in range(num_sequences))
    positions = [sorted(rng.sample(range(1, length + 1), num_checkpoints)) for length in lengths]
    return Batch(
        lengths,
        tuple(sequence for sequence, own in enumerate(positions) for _ in own),
        tuple(position for own in positions for position in own),
        tuple((length - 1) // chunk_size * chunk_size for length in lengths),
    )


def state_spans(shape: LayerShape, batch: Batch, device: torch.device | str) -> Spans:
    """Spans from chunk states to our positions, on the grid of the model's family."""
    grid = spans_over_batch if shape.family is Family.MAMBA2 else spans_per_sequence
    return grid(batch.checkpoints, batch.lengths, shape.chunk_size, device)


def window_spans(batch: Batch, device: torch.device | str) -> Spans:
    """Spans of the windows of the convolution."""
    return spans_from_start(batch.checkpoints, batch.lengths, device)


def num_chunks(shape: LayerShape, batch: Batch) -> int:
    """Count the chunk states that a prefill leaves."""
    if shape.family is Family.MAMBA2:
        return -(-batch.num_tokens // shape.chunk_size)
    return sum(-(-length // shape.chunk_size) for length in batch.lengths)
