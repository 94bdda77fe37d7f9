"""FlashInfer's rows, the states that its prefill of the gated delta rule leaves, are those of the recurrence.

A server asks for a row every so many tokens, a multiple of 64, and walks from there to where a state is wanted
(`gated_delta_rule.advance`). Both are held against the definition, one token after the other in float64. The same is
asked of rows that the recurrence itself makes, which needs no card, and of rows that are one too late.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import gated_delta_rule
from sgl_kernel_ext.checkpoints import Checkpoints, spans_after_chunks

from . import recurrence
from .batch import cu_seqlens, generator, sequences

LENGTHS = (65, 200, 1, 128, 63, 260)
WHERE = ((0, 1), (0, 64), (0, 65), (1, 63), (1, 127), (1, 193), (2, 1), (3, 128), (4, 62), (5, 191), (5, 259))
"""(sequence, position): before the first row, at a row, and up to a row less one token behind one."""
NUM_KEY_HEADS, NUM_HEADS, WIDTH = 2, 4, 128
"""FlashInfer has a kernel for heads of 128 channels alone."""
MAX_ERROR = 1.6e-2
"""Of the largest value: FlashInfer multiplies in bfloat16."""
Rows = Callable[["Batch", int], Tensor]


class Batch:
    """Inputs as a server in bfloat16 has them, keys and queries of unit length; and every state of every sequence."""

    def __init__(self) -> None:
        num_tokens = sum(LENGTHS)

        def normal(*size: int, seed: int) -> Tensor:
            return torch.randn(*size, generator=generator(seed))

        unit = [torch.nn.functional.normalize(normal(num_tokens, NUM_KEY_HEADS, WIDTH, seed=s), dim=-1) for s in (1, 2)]
        self.q, self.k = (each.bfloat16() for each in unit)
        self.v = normal(num_tokens, NUM_HEADS, WIDTH, seed=3).bfloat16()
        self.g = -0.1 * torch.rand(num_tokens, NUM_HEADS, generator=generator(4))
        self.beta = torch.rand(num_tokens, NUM_HEADS, generator=generator(5))
        self.initial = normal(len(LENGTHS), NUM_HEADS, WIDTH, WIDTH, seed=6)
        inputs = (self.q, self.k, self.v, self.g, self.beta)
        self.states = [
            recurrence.gated_delta_rule(*(each[own] for each in inputs), 1.0, self.initial[i])[1]
            for i, own in sequences(LENGTHS)
        ]

    def ends(self, every: int) -> list[Tensor]:
        """The states after each sequence's whole chunks of `every` tokens."""
        return [states[each] for states in self.states for each in range(every, len(states), every)]


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


def by_recurrence(batch: Batch, every: int) -> Tensor:
    return torch.stack(batch.ends(every)).float()


def one_late(batch: Batch, every: int) -> Tensor:
    """Each row is the state a token after its own."""
    late = [s[min(each + 1, len(s) - 1)] for s in batch.states for each in range(every, len(s), every)]
    return torch.stack(late).float()


def by_flashinfer(batch: Batch, every: int) -> Tensor:
    """The rows of SGLang's `FlashInferGDNKernel`, asked for as `prefill/operands.py` does."""
    module = pytest.importorskip("sglang.srt.layers.attention.linear.kernels.gdn_flashinfer")
    if not module.is_flashinfer_gdn_prefill_available():
        pytest.skip("NEEDS FLASHINFER'S KERNELS OF THE GATED DELTA RULE, which are not here: this test did not run")
    device = torch.device("cuda")
    before = torch.tensor([0, *(length // every for length in LENGTHS)]).cumsum(0)
    pool = batch.initial.to(device)
    *_, rows = module.FlashInferGDNKernel().extend(
        *(each[None].to(device) for each in (batch.q, batch.k, batch.v, batch.g, batch.beta)),
        ssm_states=pool,
        cache_indices=torch.arange(len(LENGTHS), dtype=torch.int32, device=device),
        query_start_loc=cu_seqlens(LENGTHS).to(device, torch.int32),
        state_checkpoint_cu_starts=before.to(device),
        num_state_checkpoints=int(before[-1]),
        state_checkpoint_every_n_tokens=every,
    )
    final = torch.stack([states[-1] for states in batch.states])
    assert error_of(pool, final) <= MAX_ERROR, "the states that sequences end in are not the recurrence's"
    found: Tensor = rows[0]
    return found


def error_of(actual: Tensor, expected: Tensor) -> float:
    """Of the largest value."""
    return float((actual.double().cpu() - expected).abs().max() / expected.abs().max())


def walked(batch: Batch, rows: Tensor, every: int) -> Tensor:
    """The states at `WHERE`, from these rows."""
    device = rows.device
    pool = torch.full((len(WHERE), NUM_HEADS, WIDTH, WIDTH), torch.nan, device=device)
    where = Checkpoints([i for i, _ in WHERE], [p for _, p in WHERE], range(len(WHERE)))
    gated_delta_rule.advance(
        *(each.to(device) for each in (batch.k, batch.v, batch.g, batch.beta)),
        rows,
        spans=spans_after_chunks(where, LENGTHS, every, device),
        pool=pool,
        initial_states=batch.initial.to(device),
    )
    return pool


@pytest.mark.parametrize("every", [64, 128, 192])
@pytest.mark.parametrize("rows_of", [by_recurrence, pytest.param(by_flashinfer, marks=pytest.mark.gpu)])
def test_rows_and_the_states_walked_to_from_them_are_those_of_the_recurrence(
    rows_of: Rows, every: int, batch: Batch
) -> None:
    rows = rows_of(batch, every)
    assert len(rows) == sum(length // every for length in LENGTHS)
    assert error_of(rows, torch.stack(batch.ends(every))) <= MAX_ERROR
    expected = torch.stack([batch.states[sequence][position] for sequence, position in WHERE])
    assert error_of(walked(batch, rows, every), expected) <= MAX_ERROR


def test_negative_control_rows_that_are_a_token_late_are_seen(batch: Batch) -> None:
    rows = one_late(batch, 64)
    assert error_of(rows, torch.stack(batch.ends(64))) > 2 * MAX_ERROR
    expected = torch.stack([batch.states[sequence][position] for sequence, position in WHERE])
    assert error_of(walked(batch, rows, 64), expected) > 2 * MAX_ERROR
