"""A kernel is not launched where it would read past the rows that it is given."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext.checkpoints import (
    Checkpoints,
    last_chunks,
    spans_after_chunks,
    spans_from_start,
    spans_over_batch,
    spans_per_sequence,
)
from sgl_kernel_ext.gated_delta_rule import kernel as gated_delta_rule
from sgl_kernel_ext.kda import kernel as kda
from sgl_kernel_ext.mamba2 import kernel as mamba2
from sgl_kernel_ext.short_conv import kernel as short_conv
from sgl_kernel_ext.state_pool import StateSlots

LENGTHS = (70, 130)
WHERE = Checkpoints([0, 1, 1], [3, 69, 130], [0, 1, 2])
NUM_SEQUENCES = 2
TOKENS = (200, 2)
STATE = (2, 16, 20)
"""Heads, rows and columns."""


def run_gated_delta_rule(pool: Tensor, *operands: Tensor, operator: Any = gated_delta_rule) -> None:
    operator.checkpoint(*operands, spans=spans_per_sequence(WHERE, LENGTHS, 64, pool.device), pool=pool)


def run_kda(pool: Tensor, *operands: Tensor) -> None:
    run_gated_delta_rule(pool, *operands, operator=kda)


def run_kda_from_snapshots(pool: Tensor, *operands: Tensor) -> None:
    spans = spans_per_sequence(WHERE, LENGTHS, 64, pool.device, last_chunks(WHERE, len(LENGTHS), 64))
    kda.checkpoint(*operands[:4], spans=spans, pool=pool, snapshots=operands[4])


def run_advance(pool: Tensor, *operands: Tensor) -> None:
    spans = spans_after_chunks(WHERE, LENGTHS, 64, pool.device)
    gated_delta_rule.advance(*operands[:5], spans=spans, pool=pool, initial_states=operands[5])


def run_mamba2(pool: Tensor, *operands: Tensor) -> None:
    x, delta, sums, B, chunk_states, initial_states = operands
    mamba2.checkpoint(
        x,
        delta.transpose(0, 1),
        sums.transpose(0, 1),
        B,
        chunk_states,
        initial_states=initial_states,
        chunk_size=64,
        spans=spans_over_batch(WHERE, LENGTHS, 64, pool.device),
        pool=pool,
    )


def run_short_conv(pool: Tensor, x: Tensor, slots: Tensor, has_initial_state: Tensor) -> None:
    states = StateSlots(pool, slots.int() + 5, has_initial_state.bool())
    short_conv.checkpoint(x, states=states, spans=spans_from_start(WHERE, LENGTHS, pool.device), pool=pool)


ROWS: dict[Callable[..., None], tuple[tuple[int, ...], ...]] = {
    run_gated_delta_rule: ((*TOKENS, 20), (*TOKENS, 16), TOKENS, (5, *STATE)),
    run_kda: ((*TOKENS, 20), (*TOKENS, 16), (*TOKENS, 20), (5, *STATE)),
    run_kda_from_snapshots: ((*TOKENS, 20), (*TOKENS, 16), (*TOKENS, 20), (4, *STATE), (NUM_SEQUENCES, *STATE)),
    run_advance: ((*TOKENS, 20), (*TOKENS, 16), TOKENS, TOKENS, (3, *STATE), (NUM_SEQUENCES, *STATE)),
    run_mamba2: ((*TOKENS, 16), *((4, 2, 64),) * 2, (*TOKENS, 20), (4, *STATE), (NUM_SEQUENCES, *STATE)),
    run_short_conv: ((TOKENS[0], 16), (NUM_SEQUENCES,), (NUM_SEQUENCES,)),
}
"""What each is given, as many rows as it needs."""


@pytest.mark.parametrize("run", ROWS)
def test_a_row_too_few_of_any_operand_is_refused(run: Callable[..., None], device: torch.device) -> None:
    pool = torch.zeros(9, *((16, 3) if run is run_short_conv else STATE), device=device)
    operands = [torch.ones(shape, device=device) for shape in ROWS[run]]
    run(pool, *operands)
    assert pool.any(), "with all rows it runs"
    for short in range(len(operands)):
        with pytest.raises(ValueError, match="must"):
            run(pool, *(each[:-1] if i == short else each for i, each in enumerate(operands)))
