"""Windows of short convolutions that are layers of their own, kept inside a prefill, are those of one that ends there.

LFM2's inputs are convolved by a function that the CPU platform replaces, or gated and convolved at once by a kernel for
GPUs; ZAYA1's by SGLang's own code, which runs here as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import torch
from sglang.srt.models.zaya import cca_extend
from torch import Tensor

from marconi.engine.prefill import operands, spans
from marconi.engine.prefill.checkpoint import Checkpoint
from marconi.engine.prefill.spans import Family
from marconi_cpu.convolution import causal_conv1d_fn

CHANNELS, HIDDEN, WIDTH = 6, 8, 3
LENGTHS, PREFIXES = (7, 1, 4), (0, 40, 7)
EVERYWHERE = [(row, position) for row, length in enumerate(LENGTHS) for position in range(1, length + 1)]
NUM_SLOTS = len(LENGTHS) + len(EVERYWHERE)
LAYER = 4

Prefill = Callable[[Any, Sequence[int], Tensor, Tensor], None]
"""Of sequences of these lengths, from inputs (num_tokens, CHANNELS) and hidden states (num_tokens, HIDDEN)."""


class ShortConvAttnBackend:
    """By its name: SGLang's backend of a short convolution, with the pools of one layer."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(5)
        self.conv = [
            torch.randn(1, NUM_SLOTS, CHANNELS, WIDTH - 1, generator=random),
            torch.randn(1, NUM_SLOTS, HIDDEN, 1, generator=random),
        ]
        self.forward_metadata = SimpleNamespace(mamba_cache_indices=torch.arange(len(LENGTHS)))
        self.req_to_token_pool = SimpleNamespace(
            mamba_pool=SimpleNamespace(
                mamba_cache=SimpleNamespace(conv=self.conv, temporal=torch.empty(1, NUM_SLOTS, 1, HIDDEN, 0))
            ),
            mamba_map={LAYER: 0},
            translate_mamba_indices=lambda slots: slots,
        )


def bounds(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def lfm2(linear: Any, lengths: Sequence[int], inputs: Tensor, _hidden: Tensor) -> None:
    causal_conv1d_fn(
        inputs.T.contiguous(),
        torch.ones(CHANNELS, WIDTH),
        None,
        linear.conv[0][0],
        bounds(lengths),
        cache_indices=linear.forward_metadata.mamba_cache_indices,
        has_initial_state=torch.tensor(PREFIXES) > 0,
        activation=None,
    )


def lfm2_moe(linear: Any, lengths: Sequence[int], inputs: Tensor, hidden: Tensor) -> None:
    """As on a GPU, whose kernel the same convolution stands for."""
    gate = torch.full_like(inputs, 2.0)
    slots, continues = linear.forward_metadata.mamba_cache_indices, torch.tensor(PREFIXES) > 0
    operands.before_fused_convolution(
        gate, gate, inputs / 2, gate, linear.conv[0][0], bounds(lengths), slots, continues, max(lengths)
    )
    lfm2(linear, lengths, inputs, hidden)


def zaya(linear: Any, lengths: Sequence[int], inputs: Tensor, hidden: Tensor) -> None:
    def convolve(padded: Tensor) -> Tensor:
        return padded[..., WIDTH - 1 :]

    slots = linear.forward_metadata.mamba_cache_indices.tolist()
    arguments = (
        *(inputs, hidden, convolve, linear.conv[0][0], linear.conv[1][0]),
        *(slots, [prefix > 0 for prefix in PREFIXES], lengths, WIDTH - 1),
    )
    operands.before_cca(*arguments)
    cca_extend(*arguments)


@pytest.fixture(params=[lfm2, lfm2_moe, zaya], ids=lambda each: each.__name__)
def prefill(request: pytest.FixtureRequest) -> Iterator[Prefill]:
    yield request.param
    spans.begin(None, LAYER)


def batch(seed: int = 3) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS), CHANNELS, generator=random), torch.randn(sum(LENGTHS), HIDDEN, generator=random)


def planned(linear: Any, positions: Sequence[tuple[int, int]]) -> list[Checkpoint]:
    """A way for a checkpoint in a slot of its own at each of `positions`, a row and a token, begun for the layer."""
    made = [
        Checkpoint(row, PREFIXES[row] + position, torch.tensor([slot]))
        for slot, (row, position) in enumerate(positions, start=len(LENGTHS))
    ]
    forward_batch = SimpleNamespace(extend_prefix_lens_cpu=[*PREFIXES], extend_seq_lens_cpu=[*LENGTHS])
    family = spans.family_of(linear)
    assert family is Family.SHORT_CONVOLUTION
    spans.begin(spans.prepare(family, linear, forward_batch, made), LAYER)
    return made


def truncated(run: Prefill, row: int, position: int) -> list[Tensor]:
    """What a prefill that ends there leaves of the row's sequence; the others end with their first token."""
    linear, ends = ShortConvAttnBackend(), [position if each == row else 1 for each in range(len(LENGTHS))]
    first = bounds(LENGTHS)[:-1].tolist()
    taken = [index for start, end in zip(first, ends, strict=True) for index in range(start, start + end)]
    run(linear, ends, *(each[taken] for each in batch()))
    return [each[0, row] for each in linear.conv]


def pools_of(run: Prefill) -> slice:
    return slice(2 if run is zaya else 1)


def test_a_window_at_any_token_is_that_of_a_prefill_that_ends_there(prefill: Prefill) -> None:
    linear = ShortConvAttnBackend()
    made = planned(linear, EVERYWHERE)
    prefill(linear, LENGTHS, *batch())
    assert [each.num_parts for each in made] == [1] * len(EVERYWHERE)
    for each, (row, position) in zip(made, EVERYWHERE, strict=True):
        kept = [pool[0, int(each.slot)] for pool in linear.conv]
        for one, other in zip(
            kept[pools_of(prefill)], truncated(prefill, row, position)[pools_of(prefill)], strict=True
        ):
            assert torch.equal(one, other), (row, position)


def test_negative_control_the_window_of_the_token_before_is_another(prefill: Prefill) -> None:
    for row, position in EVERYWHERE:
        if position > 1:
            pairs = zip(truncated(prefill, row, position), truncated(prefill, row, position - 1), strict=True)
            assert not any(torch.equal(one, other) for one, other in [*pairs][pools_of(prefill)])


def test_a_prefill_leaves_the_same_working_windows_with_and_without_a_plan(prefill: Prefill) -> None:
    with_plan, without = ShortConvAttnBackend(), ShortConvAttnBackend()
    planned(with_plan, EVERYWHERE[:3])
    prefill(with_plan, LENGTHS, *batch())
    prefill(without, LENGTHS, *batch())
    for one, other in zip(with_plan.conv, without.conv, strict=True):
        assert torch.equal(one[:, : len(LENGTHS)], other[:, : len(LENGTHS)])


def test_a_layer_ends_where_its_windows_are_kept(prefill: Prefill) -> None:
    linear = ShortConvAttnBackend()
    made = planned(linear, [(0, 2)])
    prefill(linear, LENGTHS, *batch())
    kept = [each.clone() for each in linear.conv]
    prefill(linear, LENGTHS, *batch(seed=4))
    assert made[0].num_parts == 1
    assert all(
        torch.equal(one[:, len(LENGTHS)], other[:, len(LENGTHS)]) for one, other in zip(kept, linear.conv, strict=True)
    )


def test_a_layer_whose_kernel_was_not_met_is_not_counted() -> None:
    linear = ShortConvAttnBackend()
    made = planned(linear, [(0, 2)])
    spans.begin(None, LAYER)
    lfm2(linear, LENGTHS, *batch())
    assert made[0].num_parts == 0
