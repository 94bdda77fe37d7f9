"""A warm-up changes no bit of the pools of a running server."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import launch, warm_up
from sgl_kernel_ext.checkpoints import Spans

from .batch import generator

CALLS: tuple[tuple[Callable[[Tensor], None], tuple[int, ...]], ...] = (
    (partial(warm_up.gated_delta_rule_checkpoint, num_key_heads=2, dtype=torch.float16), (4, 32, 16)),
    (partial(warm_up.gated_delta_rule_advance, num_key_heads=2, dtype=torch.float16), (4, 32, 16)),
    (partial(warm_up.kda_checkpoint, num_key_heads=4, dtype=torch.float16), (4, 32, 16)),
    (partial(warm_up.mamba2_checkpoint, num_groups=2, chunk_size=64, dtype=torch.float16), (4, 32, 16)),
    (lambda pool: warm_up.short_conv_checkpoint(pool, pool.new_empty(1, 48, dtype=torch.float16)), (48, 3)),
    (warm_up.state_copies, (4, 32, 16)),
    (lambda pool: warm_up.find_draft_ends(pool.view(torch.int32), max_depth=5), (2,)),
)


@pytest.mark.parametrize(("call", "shape"), CALLS)
def test_no_bit_of_a_pool_changes(
    call: Callable[[Tensor], None], shape: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "runs_kernels", lambda _: True)
    pool = torch.randn(7, *shape, generator=generator()).to(device)
    before = pool.clone()
    call(pool)
    assert torch.equal(pool, before)


@pytest.mark.parametrize(("call", "shape"), CALLS[:5])
def test_a_span_to_a_slot_would_be_seen(
    call: Callable[[Tensor], None], shape: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the same launches with a slot of the pool write to it."""
    monkeypatch.setattr(launch, "runs_kernels", lambda _: True)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    monkeypatch.setattr(warm_up, "_nothing", lambda _: Spans(zero, zero, zero, zero, zero + 5, max_tokens=0))
    pool = torch.randn(7, *shape, generator=generator()).to(device)
    before = pool.clone()
    call(pool)
    assert not torch.equal(pool[5], before[5])
    assert torch.equal(pool[:5], before[:5])
