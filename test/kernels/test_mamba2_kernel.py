"""The kernel of Mamba2 writes the states that its reference does, and nothing else."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_over_batch
from sgl_kernel_ext.mamba2 import kernel, prefill, reference
from sgl_kernel_ext.state_pool import StateSlots

from .batch import cu_seqlens, generator
from .kernel_checks import DTYPES, EVERYWHERE, LENGTHS, assert_states, checkpoints, narrowest, pairwise, poisoned_pool

SHAPES = ((1, 1, 16, 16), (2, 4, 20, 12), (2, 2, 64, 128), (1, 3, 72, 20))
"""Groups, heads, head_dim, state_dim: grouped, wider than a block, and no power of two."""
CHUNK_SIZES = (64, 65, 256)
"""A chunk of one block of tokens; one with which sequences begin; one of several blocks that holds whole sequences."""
WHERE = (*EVERYWHERE, (0, 0), (2, 0))
NUM_SLOTS = 15


@dataclass(frozen=True)
class Operands:
    x: Tensor
    delta: Tensor
    decay_sums: Tensor
    B: Tensor
    chunk_states: Tensor
    initial_states: Tensor | None
    chunk_size: int


def with_gaps(tensor: Tensor) -> Tensor:
    """The same values, between them NaN in memory."""
    return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]


def operands(
    shape: tuple[int, ...],
    chunk_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    has_initial: bool = True,
    memory: float = 40.0,
) -> Operands:
    """What a prefill leaves, decaying by half in some `memory` tokens, in memory with gaps."""
    num_groups, num_heads, head_dim, state_dim = shape
    random, num_tokens = generator(3), sum(LENGTHS)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).to(dtype)

    x = normal(num_tokens, num_heads, head_dim)
    B, C = (normal(num_tokens, num_groups, state_dim) for _ in "BC")
    delta = torch.rand(num_tokens, num_heads, generator=random)
    A = -torch.rand(num_heads, generator=random) / memory
    initial = normal(len(LENGTHS), num_heads, head_dim, state_dim)
    made = prefill(
        x,
        delta,
        A,
        B,
        C,
        cu_seqlens=cu_seqlens(LENGTHS),
        chunk_size=chunk_size,
        states=StateSlots(initial.clone(), torch.arange(len(LENGTHS))) if has_initial else None,
    )
    grid_states = made.grid_states.to(dtype)
    # Where a sequence begins with its chunk, SGLang's scan leaves the end of the sequence before it.
    grid_states[[start // chunk_size for start in cu_seqlens(LENGTHS[:-1]).tolist() if start % chunk_size == 0]] = (
        torch.nan
    )
    given = [x, made.delta, made.decay_sums, B, grid_states, initial]
    given = [with_gaps(each.to(device)) for each in given]
    return Operands(*given[:5], given[5] if has_initial else None, chunk_size)


def spans_of(where: Checkpoints, chunk_size: int, device: torch.device) -> Spans:
    return spans_over_batch(where, LENGTHS, chunk_size, device)


def pool_for(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return poisoned_pool(NUM_SLOTS, shape[1:], dtype, device)


def assert_kernel_is_reference(given: Operands, shape: tuple[int, ...], pool_dtype: torch.dtype) -> None:
    device = given.x.device
    spans = spans_of(checkpoints(WHERE, NUM_SLOTS, device), given.chunk_size, device)
    expected, actual = (pool_for(shape, pool_dtype, device) for _ in range(2))
    reference.checkpoint(**vars(given), spans=spans, pool=expected)
    kernel.checkpoint(**vars(given), spans=spans, pool=actual)
    assert_states(actual, expected, spans.slots, narrowest(given.x.dtype, pool_dtype))


@pytest.mark.parametrize(("shape", "chunk_size", "dtype", "pool_dtype"), pairwise(SHAPES, CHUNK_SIZES, DTYPES, DTYPES))
def test_states_at_every_kind_of_position(
    shape: tuple[int, ...], chunk_size: int, dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> None:
    assert_kernel_is_reference(operands(shape, chunk_size, dtype, device), shape, pool_dtype)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_sequences_without_initial_states_start_from_zero(chunk_size: int, device: torch.device) -> None:
    shape = SHAPES[1]
    given = operands(shape, chunk_size, torch.float32, device, has_initial=False)
    assert_kernel_is_reference(given, shape, torch.float32)


@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_strong_decay_leaves_no_trace_and_overflows_nowhere(chunk_size: int, device: torch.device) -> None:
    shape = SHAPES[1]
    assert_kernel_is_reference(operands(shape, chunk_size, torch.float32, device, memory=1e-3), shape, torch.float32)


def test_nothing_to_keep_launches_nothing(device: torch.device) -> None:
    pool = pool_for(SHAPES[0], torch.float32, device)
    spans = spans_of(checkpoints((), NUM_SLOTS, device), 64, device)
    kernel.checkpoint(**vars(operands(SHAPES[0], 64, torch.float32, device)), spans=spans, pool=pool)
    assert_states(pool, pool, spans.slots, torch.float32)


def test_a_wrong_position_is_seen(device: torch.device) -> None:
    """Negative control: the comparison can fail."""
    shape = SHAPES[1]
    given = operands(shape, 64, torch.float32, device)
    expected, actual = (pool_for(shape, torch.float32, device) for _ in range(2))
    spans = spans_of(checkpoints([(1, 64)], NUM_SLOTS, device), 64, device)
    reference.checkpoint(**vars(given), spans=spans, pool=expected)
    spans = spans_of(checkpoints([(1, 65)], NUM_SLOTS, device), 64, device)
    kernel.checkpoint(**vars(given), spans=spans, pool=actual)
    with pytest.raises(AssertionError):
        assert_states(actual, expected, spans.slots, torch.float32)
