"""States of Kimi Delta Attention at any token are the recurrence's, and bad operands are named.

What it has in common with other operators: `test_operators.py`.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import kda
from sgl_kernel_ext.checkpoints import Checkpoints, spans_over_batch, spans_per_sequence
from sgl_kernel_ext.state_pool import StateSlots

from . import recurrence
from .batch import RAGGED, assert_close, pool_of, sequences
from .operators import SCALE, initial_states, no_state
from .operators import kda_tokens as tokens


@pytest.mark.parametrize("log_base", [math.e, 2.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_checkpoint_at_any_token_is_the_recurrence(dtype: torch.dtype, log_base: float) -> None:
    given = tokens(sum(RAGGED), dtype=dtype)
    starts = initial_states(len(RAGGED))
    (pool, slots), chunk_size = pool_of(starts), 16
    result = given.prefill(RAGGED, states=StateSlots(pool, slots), chunk_size=chunk_size)
    sums = result.decay_sums / math.log(log_base)
    for sequence, own in sequences(RAGGED):
        length = RAGGED[sequence]
        _, states = given[own].expected(starts[sequence])
        where = Checkpoints([sequence] * (length + 1), range(length + 1), range(length + 1))
        if length:
            spans = spans_per_sequence(where, RAGGED, chunk_size, "cpu")
            kept = torch.full_like(states, torch.nan)
            kda.checkpoint(
                given.k, result.corrected_values, sums, result.chunk_states, spans=spans, pool=kept, log_base=log_base
            )
            assert_close(kept, states, dtype)


@pytest.mark.parametrize("decay", [-5.0, -80.0])
def test_strong_decay_neither_overflows_nor_leaves_a_trace(decay: float) -> None:
    """Upstream's safe gate allows a log decay of -5 a token: 320 over a chunk, where exp(-G) is beyond float32."""
    length = 200
    given = tokens(length, dtype=torch.float32)
    given.g[..., ::2] = decay
    result = given.prefill((length,))
    outputs, states = given.expected(no_state())
    assert_close(result.outputs, outputs, torch.float32)
    assert_close(result.final_states[0], states[-1], torch.float32)
    kept = torch.full_like(states, torch.nan, dtype=torch.float32)
    where = Checkpoints([0] * (length + 1), range(length + 1), range(length + 1))
    spans = spans_per_sequence(where, (length,), 64, "cpu")
    kda.checkpoint(given.k, result.corrected_values, result.decay_sums, result.chunk_states, spans=spans, pool=kept)
    assert_close(kept, states, torch.float32)


def test_one_decay_for_all_channels_is_the_gated_delta_rule() -> None:
    given = tokens(130)
    given = replace(given, g=given.g[..., :1].expand_as(given.g))
    outputs, states = recurrence.gated_delta_rule(
        given.q, given.k, given.v, given.g[..., 0], given.beta, SCALE, no_state()
    )
    result = given.prefill((130,))
    assert_close(result.outputs, outputs, torch.float64)
    assert_close(result.final_states[0], states[-1], torch.float64)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("v", torch.zeros(8, 4)),
        ("v", torch.zeros(8, 4, 20, dtype=torch.int64)),
        ("k", torch.zeros(8, 3, 12)),
        ("k", torch.zeros(8, 1, 12, dtype=torch.bfloat16)),
        ("q", torch.zeros(8, 1, 13)),
        ("g", torch.zeros(8, 4)),
        ("g", torch.zeros(8, 4, 13)),
        ("beta", torch.zeros(8, 4, dtype=torch.int64)),
    ],
)
def test_a_bad_input_is_named(name: str, bad: Tensor) -> None:
    given = replace(tokens(8, dtype=torch.float32), **{name: bad})
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        given.prefill((8,))
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        given.decode(StateSlots(initial_states(8), torch.arange(8)))


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("k", torch.zeros(70, 12)),
        ("corrected_values", torch.zeros(69, 4, 20)),
        ("decay_sums", torch.zeros(70, 4)),
        ("chunk_states", torch.zeros(2, 4, 12, 20)),
        ("chunk_states must have the 2 rows", torch.zeros(1, 4, 20, 12)),
        ("pool", torch.zeros(3, 4, 20, 12, dtype=torch.int32)),
        ("a slot must be 0 to 1", torch.zeros(2, 4, 20, 12)),
        ("snapshots", torch.zeros(1, 4, 12, 20)),
        ("snapshots must have 1 rows", torch.zeros(0, 4, 20, 12)),
        ("log_base", 1.0),
        ("log_base", math.nan),
    ],
)
def test_a_bad_checkpoint_is_named_and_writes_nothing(name: str, bad: object) -> None:
    given = {
        "k": torch.zeros(70, 1, 12),
        "corrected_values": torch.zeros(70, 4, 20),
        "decay_sums": torch.zeros(70, 4, 12),
        "chunk_states": torch.zeros(2, 4, 20, 12),
        "pool": torch.full((3, 4, 20, 12), torch.nan),
        "log_base": math.e,
        "spans": spans_per_sequence(Checkpoints([0], [70], [2]), (70,), 64, "cpu"),
    }
    pool = given["pool"]
    given["pool" if "slot" in name else name.split()[0]] = bad
    with pytest.raises(ValueError, match=rf"\b{name}\b.*got"):
        kda.checkpoint(**given)  # type: ignore[arg-type]
    assert isinstance(pool, Tensor)
    assert pool.isnan().all()


def test_spans_of_another_batch_are_refused() -> None:
    operands = (torch.zeros(70, 1, 12), torch.zeros(70, 4, 20), torch.zeros(70, 4, 12), torch.zeros(2, 4, 20, 12))
    pool = torch.zeros(3, 4, 20, 12)
    longer = spans_per_sequence(Checkpoints([0], [60], [2]), (71,), 64, "cpu")
    with pytest.raises(ValueError, match="must have the 71 tokens of the spans, got 70"):
        kda.checkpoint(*operands, spans=longer, pool=pool)
    of_batch = spans_over_batch(Checkpoints([1], [2], [2]), (60, 10), 64, "cpu")
    with pytest.raises(ValueError, match="every span must start from a chunk"):
        kda.checkpoint(*operands, spans=of_batch, pool=pool)
