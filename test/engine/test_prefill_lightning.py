"""A lightning layer that is cut where states are kept computes what it does in one piece.

Layer and kernel are SGLang's own; the kernel runs in Triton's interpreter.
"""

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="the server extra is not installed: pip install '.[server]'")
pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

import torch
import triton.language
from sglang.kernels.ops.attention.linear import seg_la
from sglang.srt.layers.attention.linear.lightning_backend import LightningAttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from marconi.engine.prefill import hooks, passes
from marconi.engine.prefill.checkpoint import Checkpoint

NUM_HEADS, WIDTH = 2, 128
NUM_SLOTS = 16
LENGTHS, PREFIXES = (70, 33, 5), (0, 40, 7)
"""Blocks of the kernel are 32 tokens; a sequence without a prefix starts from zero whatever its slot holds."""
WANTED = ((0, 1), (0, 32), (0, 45), (0, 70), (1, 1), (1, 33), (2, 1))
"""(sequence, position): the first token of each, on and off the grid of blocks, and the end."""


class Prefilled(NamedTuple):
    outputs: Tensor
    pool: Tensor
    checkpoints: list[Checkpoint]


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> Iterator[None]:
    """The kernels of a prefill, and of one whose sequences have a token each, on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("seg_la_p_kernel", "seg_la_d_kernel"):
            patch.setattr(seg_la, name, InterpretedFunction(getattr(seg_la, name).fn))
        patch.setattr(triton.language, "sum", triton.language.sum.fn)
        yield


@pytest.fixture(scope="module")
def cut(interpreted: None) -> Prefilled:
    """All sequences at once, with states kept everywhere."""
    return prefill(range(3), LENGTHS, WANTED)


def layer_over(pool: Tensor) -> LightningAttentionBackend:
    """SGLang's backend, without the runner that it takes its pools from."""
    backend = LightningAttentionBackend.__new__(LightningAttentionBackend)
    states = SimpleNamespace(conv=[torch.zeros(NUM_SLOTS, 1, 1)], temporal=pool)
    backend.req_to_token_pool = SimpleNamespace(
        get_mamba_indices=lambda rows: rows,
        translate_mamba_indices=lambda slots: slots,
        mamba2_layer_cache=lambda layer_id: states,
    )
    backend.device, backend.kv_cache_dtype_str, backend.linear_backend = "cpu", "auto", "seg_la"
    backend.tp_slope = [torch.tensor([0.3, 0.004]).view(-1, 1, 1)]
    return backend


def batch_of(rows: Sequence[int], lengths: Sequence[int]) -> Any:
    prefixes = [PREFIXES[row] for row in rows]
    ends = [prefix + length for prefix, length in zip(prefixes, lengths, strict=True)]
    names = ("mamba_track_indices", "mamba_track_mask", "mamba_track_seqlens", "mamba_prefill_track_mask_cpu")
    return SimpleNamespace(
        **dict.fromkeys((*names, "mamba_track_seqlens_cpu", "spec_info", "tbo_parent_token_range")),
        batch_size=len(rows),
        req_pool_indices=torch.tensor([row + 1 for row in rows]),
        seq_lens=torch.tensor(ends),
        extend_num_tokens=sum(lengths),
        extend_prefix_lens=torch.tensor(prefixes),
        extend_prefix_lens_cpu=prefixes,
        extend_seq_lens=torch.tensor(lengths),
        extend_seq_lens_cpu=list(lengths),
        extend_start_loc=torch.tensor([sum(lengths[:at]) for at in range(len(lengths))]),
        forward_mode=ForwardMode.EXTEND,
        logical_forward_mode=ForwardMode.EXTEND,
        sampling_info=object(),
    )


def prefill(rows: Sequence[int], lengths: Sequence[int], wanted: Sequence[tuple[int, int]] = ()) -> Prefilled:
    """Sequences up to some of their tokens, with states kept at `wanted`, through the hooks."""
    random = torch.Generator().manual_seed(3)
    pool = torch.randn(NUM_SLOTS, NUM_HEADS, WIDTH, WIDTH, generator=random)
    pool[1] = 0  # SGLang clears the slot of a sequence that starts anew
    starts = [sum(LENGTHS[:row]) for row in range(len(LENGTHS))]
    taken = torch.cat([torch.arange(starts[row], starts[row] + n) for row, n in zip(rows, lengths, strict=True)])
    q, k, v = (torch.randn(sum(LENGTHS), NUM_HEADS, WIDTH, generator=random)[taken] for _ in range(3))
    linear = layer_over(pool)
    hybrid = SimpleNamespace(linear_attn_backend=linear, _is_full_attn=lambda layer, layer_id: False)
    checkpoints = [
        Checkpoint(row, PREFIXES[rows[row]] + at, torch.tensor([5 + n])) for n, (row, at) in enumerate(wanted)
    ]
    forward_batch = batch_of(rows, lengths)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, marconi_plan=checkpoints)
    hooks.on_init_new(
        forward_batch, SimpleNamespace, batch, SimpleNamespace(attn_backend=hybrid, is_draft_worker=False)
    )
    linear.init_forward_metadata(forward_batch)
    hooks.on_init_forward_metadata(None, hybrid, forward_batch)
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=NUM_HEADS, v_head_dim=WIDTH, scaling=WIDTH**-0.5, k_scale=None)
    forward: Callable[..., Tensor] = lambda _, **given: linear.forward_extend(**given)  # noqa: E731
    names = {"q": q, "k": k, "v": v, "layer": layer, "forward_batch": forward_batch}
    outputs: Tensor = hooks.around_hybrid_forward(forward, hybrid, **names)
    return Prefilled(outputs, pool, checkpoints)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order of float32 sums, which blocks of other tokens change."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_outputs_and_final_states_are_those_of_one_piece(cut: Prefilled) -> None:
    whole = prefill(range(3), LENGTHS)
    assert_close(cut.outputs, whole.outputs)
    assert_close(cut.pool[1:4], whole.pool[1:4])
    others = [0, 4, *range(5 + len(WANTED), NUM_SLOTS)]
    assert torch.equal(cut.pool[others], whole.pool[others])


def test_a_state_at_any_position_is_that_of_a_prefill_that_ends_there(cut: Prefilled) -> None:
    for slot, (row, position) in enumerate(WANTED, start=5):
        assert_close(cut.pool[slot], prefill([row], [position]).pool[row + 1])
    assert {each.num_parts for each in cut.checkpoints} == {1}


def test_a_wrong_position_is_seen(cut: Prefilled) -> None:
    """Negative control: the comparison can fail."""
    row, position = WANTED[1]
    with pytest.raises(AssertionError):
        assert_close(cut.pool[6], prefill([row], [position + 1]).pool[row + 1])


def test_the_layer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel leaves no states of chunks."""
    prepared: list[passes.Passes] = []
    prepare = passes.prepare
    monkeypatch.setattr(passes, "prepare", lambda *given: prepared.append(prepare(*given)) or prepared[-1])
    prefill([2], [5], [(0, 3), (0, 5)])
    assert [len(each.passes) for each in prepared] == [2]
