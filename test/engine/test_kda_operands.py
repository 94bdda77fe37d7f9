"""The hook around SGLang's chunk kernel of KDA asks for a float32 state, and takes others from what it returns."""

import math
from contextlib import AbstractContextManager
from typing import Any

import pytest

pytest.importorskip("torch", reason="the server extra is not installed: pip install '.[server]'")
pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import torch
from torch import Tensor

from marconi.engine.prefill import operands
from marconi.engine.prefill.spans import Family, RunningLayer
from sgl_kernel_ext import kda
from sgl_kernel_ext.checkpoints import NO_CHUNK, last_chunks, spans_per_sequence

from .test_prefill_operands import (
    CU_SEQLENS,
    HEADS,
    KEYS,
    LENGTHS,
    SLOTS,
    VALUES,
    WHERE,
    a_layer,
    assert_kept,
    normal,
    truth,
    unit,
)


class KdaPrefill:
    """A prefill of `LENGTHS` by KDA, whose chunk kernel copies states in float32 and leaves `dtype`, as SGLang's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        shape = 100, HEADS, KEYS
        self.q, self.k, self.v = unit(normal(*shape)), unit(normal(*shape, seed=1)), normal(100, HEADS, VALUES, seed=2)
        self.g, self.beta = -0.1 * normal(*shape, seed=3).abs(), normal(100, HEADS, seed=4).sigmoid()
        self.made = kda.prefill(self.q, self.k, self.v, self.g, self.beta, cu_seqlens=CU_SEQLENS)
        self.dtype = dtype

    @property
    def given(self) -> dict[str, Any]:
        """What SGLang calls the chunk kernel with, beside its keys."""
        sums = self.made.decay_sums[None] / math.log(2)
        return {"w": None, "u": None, "gk": sums, "use_exp2": True, "cu_seqlens": CU_SEQLENS, "track_state": None}

    def chunk_kernel(self, *_: Any, **given: Any) -> tuple[Tensor, Tensor]:
        """`chunk_gated_delta_rule_fwd_h`."""
        copies = given["track_state"]
        if copies is not None:
            assert copies.dtype == torch.float32
            for sequence, chunk in enumerate(given["track_chunk_idx"].tolist()):
                if chunk >= 0:
                    first = sum(-(-length // 64) for length in LENGTHS[:sequence])
                    copies[sequence] = self.made.chunk_states[first + chunk]
        return self.made.chunk_states[None].to(self.dtype), self.made.corrected_values[None]

    def intra(self) -> None:
        """What SGLang has called before: `chunk_kda_fwd_intra`."""
        own = (each[None] for each in (self.q, self.k, self.v))
        operands.on_kda_intra(None, *own, gk=self.given["gk"], beta=self.beta[None])

    @property
    def expected(self) -> Tensor:
        own = self.q, self.k, self.v, self.g, self.beta
        return truth(lambda at, cu: kda.prefill(*(each[at] for each in own), cu_seqlens=cu))


def a_layer_of_kda(copied: list[int] | None = None) -> AbstractContextManager[RunningLayer]:
    """A layer that asks for copies of these chunks, of those that spans start from unless given."""
    chunks = last_chunks(WHERE, len(LENGTHS), 64) if copied is None else copied
    states = spans_per_sequence(WHERE, LENGTHS, 64, "cpu", chunks)
    return a_layer(Family.KDA, states, snapshots=torch.tensor(chunks, dtype=torch.int32))


def test_kda_from_its_keys_and_what_its_chunk_kernel_returns() -> None:
    batch = KdaPrefill()
    keys = torch.full_like(batch.k, torch.nan)[None]
    with a_layer_of_kda() as layer:
        operands.around_chunk_states(batch.chunk_kernel, k=keys, **batch.given)
        assert not layer.has_states, "the keys that the chunk kernel sees are scaled, and not taken"
        batch.intra()
        operands.around_chunk_states(batch.chunk_kernel, k=keys, **batch.given)
    assert_kept(layer, batch.expected)


def kept_of_kda(copied: list[int] | None = None) -> Tensor:
    """How far each state is off, of the largest value, where chunk states are left in bfloat16."""
    batch = KdaPrefill(torch.bfloat16)
    with a_layer_of_kda(copied) as layer:
        batch.intra()
        operands.around_chunk_states(batch.chunk_kernel, k=batch.k[None], **batch.given)
    assert layer.has_states
    off = (layer.pools.states[SLOTS] - batch.expected).abs().flatten(1).amax(1)
    return off / batch.expected.abs().max()


def test_kdas_states_start_from_float32_where_chunk_states_are_narrower() -> None:
    """Of the first sequence's two, in chunks 0 and 1, the last is copied; the other starts from zero."""
    assert last_chunks(WHERE, len(LENGTHS), 64) == [1, 0]
    assert kept_of_kda().max() < 1e-6


def test_kdas_states_from_rounded_chunk_states_are_off() -> None:
    """Negative control: without a copy, what starts behind a sequence's first token is off by bfloat16."""
    off = kept_of_kda([NO_CHUNK, NO_CHUNK])
    assert [1e-4 < float(each) < 8e-3 for each in off] == [False, True, False]


def test_kda_runs_as_it_was_called_where_it_cannot_be_asked_for_a_copy() -> None:
    """No state is written then, and what it leaves is SGLang's."""
    batch = KdaPrefill()

    def failing(*args: Any, **given: Any) -> Any:
        if given["track_state"] is not None:
            raise RuntimeError("no such kernel")
        return batch.chunk_kernel(*args, **given)

    with a_layer_of_kda() as layer:
        batch.intra()
        result = operands.around_chunk_states(failing, k=batch.k[None], **batch.given)
    assert torch.equal(result[0][0], batch.made.chunk_states)
    assert not layer.has_states


def test_kda_is_not_asked_where_sglang_tracks_a_state_itself() -> None:
    """Nor where there are more sequences than were planned, of which it would read chunks that are none."""
    batch = KdaPrefill()
    for other in ({"track_state": torch.zeros(2)}, {"cu_seqlens": torch.tensor([0, 70, 100, 100])}):
        calls: list[dict[str, Any]] = []

        def run(*_: Any, calls: list[dict[str, Any]] = calls, **given: Any) -> None:
            calls.append(given)

        given = batch.given | other
        with a_layer_of_kda() as layer:
            batch.intra()
            operands.around_chunk_states(run, batch.k[None], **given)
        (was_given,) = calls
        assert was_given.keys() == given.keys()
        assert all(was_given[name] is given[name] for name in given)
        assert not layer.has_states
