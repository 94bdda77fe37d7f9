"""The kernel of Kimi Delta Attention writes the states that its reference does, and nothing else."""

import math

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_per_sequence
from sgl_kernel_ext.kda import kernel, prefill, reference

from .batch import cu_seqlens, generator
from .kernel_checks import DTYPES, EVERYWHERE, LENGTHS, assert_states, checkpoints, narrowest, poisoned_pool

SHAPES = ((1, 1, 16, 16), (2, 4, 12, 20), (2, 2, 64, 128), (1, 3, 80, 72))
"""Key heads, value heads, key_dim, value_dim: grouped, wider than a block, and no power of two."""
NUM_SLOTS = 13


def operands(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, memory: float = 40.0) -> list[Tensor]:
    """What a prefill leaves, its channels decaying by half in `memory` tokens and up, in memory with gaps."""
    num_key_heads, num_value_heads, key_dim, value_dim = shape
    random, num_tokens = generator(3), sum(LENGTHS)

    def normal(*size: int) -> Tensor:
        return torch.randn(num_tokens, *size, generator=random)

    q, k = (torch.nn.functional.normalize(normal(num_key_heads, key_dim), dim=-1) for _ in range(2))
    memories = memory * torch.logspace(0, 1, key_dim)
    g = -torch.rand(num_tokens, num_value_heads, key_dim, generator=random) / memories
    beta = torch.rand(num_tokens, num_value_heads, generator=random)
    made = prefill(q, k, normal(num_value_heads, value_dim), g, beta, cu_seqlens=cu_seqlens(LENGTHS))
    narrow = [each.to(device, dtype) for each in (k, made.corrected_values)]
    wide = [made.decay_sums.to(device), made.chunk_states.to(device, dtype)]
    return [torch.stack([each, torch.full_like(each, torch.nan)], 1)[:, 0] for each in (*narrow, *wide)]


def spans_of(where: Checkpoints, device: torch.device) -> Spans:
    return spans_per_sequence(where, LENGTHS, 64, device)


def pools(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """One for the reference, one for the kernel."""
    expected, actual = (poisoned_pool(NUM_SLOTS, (shape[1], shape[3], shape[2]), dtype, device) for _ in range(2))
    return expected, actual


@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_states_at_every_kind_of_position(
    shape: tuple[int, ...], dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> None:
    given = operands(shape, dtype, device)
    spans = spans_of(checkpoints(EVERYWHERE, NUM_SLOTS, device), device)
    expected, actual = pools(shape, pool_dtype, device)
    reference.checkpoint(*given, spans=spans, pool=expected)
    kernel.checkpoint(*given, spans=spans, pool=actual)
    assert_states(actual, expected, spans.slots, narrowest(dtype, pool_dtype))


def test_sums_to_the_base_two_are_the_same_decay(device: torch.device) -> None:
    shape = SHAPES[1]
    k, u, sums, chunk_states = operands(shape, torch.float32, device)
    spans = spans_of(checkpoints(EVERYWHERE, NUM_SLOTS, device), device)
    expected, actual = pools(shape, torch.float32, device)
    reference.checkpoint(k, u, sums, chunk_states, spans=spans, pool=expected)
    kernel.checkpoint(k, u, sums / math.log(2), chunk_states, spans=spans, pool=actual, log_base=2.0)
    assert_states(actual, expected, spans.slots, torch.float32)


@pytest.mark.parametrize("memory", [0.1, 1e-3])
def test_strong_decay_leaves_no_trace_and_overflows_nowhere(memory: float, device: torch.device) -> None:
    shape = SHAPES[1]
    given = operands(shape, torch.float32, device, memory)
    spans = spans_of(checkpoints(EVERYWHERE, NUM_SLOTS, device), device)
    expected, actual = pools(shape, torch.float32, device)
    reference.checkpoint(*given, spans=spans, pool=expected)
    kernel.checkpoint(*given, spans=spans, pool=actual)
    assert_states(actual, expected, spans.slots, torch.float32)


def test_nothing_to_keep_launches_nothing(device: torch.device) -> None:
    shape = SHAPES[0]
    pool, _ = pools(shape, torch.float32, device)
    spans = spans_of(checkpoints((), NUM_SLOTS, device), device)
    kernel.checkpoint(*operands(shape, torch.float32, device), spans=spans, pool=pool)
    assert_states(pool, pool, spans.slots, torch.float32)


def test_a_slot_that_only_a_device_knows_to_be_outside_the_pool_gets_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spans, "require_batch", lambda *_: None)
    shape = SHAPES[1]
    given = operands(shape, torch.float32, device)
    spans = spans_of(checkpoints(EVERYWHERE, NUM_SLOTS, device), device)
    expected, actual = pools(shape, torch.float32, device)
    reference.checkpoint(*given, spans=spans, pool=expected)
    outside = torch.tensor([3, 5], device=device)
    expected[spans.slots[outside]] = torch.nan
    kept = spans.slots[[i for i in range(len(spans)) if i not in (3, 5)]]
    spans.slots[outside] = torch.tensor([-1, NUM_SLOTS], device=device)
    kernel.checkpoint(*given, spans=spans, pool=actual)
    assert_states(actual, expected, kept, torch.float32)


def test_a_wrong_position_is_seen(device: torch.device) -> None:
    """Negative control: the comparison can fail."""
    shape = SHAPES[1]
    given = operands(shape, torch.float32, device)
    expected, actual = pools(shape, torch.float32, device)
    reference.checkpoint(*given, spans=spans_of(checkpoints([(1, 64)], NUM_SLOTS, device), device), pool=expected)
    spans = spans_of(checkpoints([(1, 65)], NUM_SLOTS, device), device)
    kernel.checkpoint(*given, spans=spans, pool=actual)
    with pytest.raises(AssertionError):
        assert_states(actual, expected, spans.slots, torch.float32)
