"""The kernel of the gated delta rule writes the states that its reference does, and nothing else."""

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_after_chunks, spans_from_start, spans_per_sequence
from sgl_kernel_ext.gated_delta_rule import kernel, prefill, reference

from .batch import cu_seqlens, generator
from .kernel_checks import DTYPES, EVERYWHERE, LENGTHS, assert_states, checkpoints, narrowest, pairwise, poisoned_pool

SHAPES = ((1, 1, 16, 16), (2, 4, 12, 20), (2, 2, 64, 128), (1, 3, 80, 72))
"""Key heads, value heads, key_dim, value_dim: grouped, wider than a block, and no power of two."""
NUM_SLOTS = 13


def operands(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, memory: float = 40.0) -> list[Tensor]:
    """What a prefill leaves, decaying by half in some `memory` tokens, in memory with gaps."""
    num_key_heads, num_value_heads, key_dim, value_dim = shape
    random, num_tokens = generator(3), sum(LENGTHS)

    def normal(*size: int) -> Tensor:
        return torch.randn(num_tokens, *size, generator=random)

    q, k = (torch.nn.functional.normalize(normal(num_key_heads, key_dim), dim=-1) for _ in range(2))
    g = -torch.rand(num_tokens, num_value_heads, generator=random) / memory
    beta = torch.rand(num_tokens, num_value_heads, generator=random)
    made = prefill(q, k, normal(num_value_heads, value_dim), g, beta, cu_seqlens=cu_seqlens(LENGTHS))
    narrow = [each.to(device, dtype) for each in (k, made.corrected_values)]
    wide = [made.decay_sums.to(device), made.chunk_states.to(device, dtype)]
    return [torch.stack([each, torch.full_like(each, torch.nan)], 1)[:, 0] for each in (*narrow, *wide)]


def spans_of(where: Checkpoints, device: torch.device) -> Spans:
    return spans_per_sequence(where, LENGTHS, 64, device)


@pytest.mark.parametrize(("shape", "dtype", "pool_dtype"), pairwise(SHAPES, DTYPES, DTYPES))
def test_states_at_every_kind_of_position(
    shape: tuple[int, ...], dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> None:
    given = operands(shape, dtype, device)
    where = checkpoints(EVERYWHERE, NUM_SLOTS, device)
    spans = spans_of(where, device)
    expected, actual = (poisoned_pool(NUM_SLOTS, (shape[1], shape[3], shape[2]), pool_dtype, device) for _ in range(2))
    reference.checkpoint(*given, spans=spans, pool=expected)
    kernel.checkpoint(*given, spans=spans, pool=actual)
    assert_states(actual, expected, spans.slots, narrowest(dtype, pool_dtype))


def test_strong_decay_leaves_no_trace_and_overflows_nowhere(device: torch.device) -> None:
    shape = SHAPES[1]
    given = operands(shape, torch.float32, device, memory=1e-3)
    spans = spans_of(checkpoints(EVERYWHERE, NUM_SLOTS, device), device)
    expected, actual = (poisoned_pool(NUM_SLOTS, (shape[1], shape[3], shape[2]), torch.float32, device) for _ in "ab")
    reference.checkpoint(*given, spans=spans, pool=expected)
    kernel.checkpoint(*given, spans=spans, pool=actual)
    assert_states(actual, expected, spans.slots, torch.float32)


def test_operands_may_begin_with_a_dimension_of_1(device: torch.device) -> None:
    shape = SHAPES[1]
    given = operands(shape, torch.float32, device)
    spans = spans_of(checkpoints(EVERYWHERE, NUM_SLOTS, device), device)
    expected, *others = (poisoned_pool(NUM_SLOTS, (shape[1], shape[3], shape[2]), torch.float32, device) for _ in "abc")
    reference.checkpoint(*given, spans=spans, pool=expected)
    for run, pool in zip((reference.checkpoint, kernel.checkpoint), others, strict=True):
        run(*(each[None] for each in given), spans=spans, pool=pool)
        assert_states(pool, expected, spans.slots, torch.float32)


def test_nothing_to_keep_launches_nothing(device: torch.device) -> None:
    shape = SHAPES[0]
    pool = poisoned_pool(NUM_SLOTS, (shape[1], shape[3], shape[2]), torch.float32, device)
    spans = spans_of(checkpoints((), NUM_SLOTS, device), device)
    kernel.checkpoint(*operands(shape, torch.float32, device), spans=spans, pool=pool)
    assert_states(pool, pool, spans.slots, torch.float32)


def test_a_wrong_position_is_seen(device: torch.device) -> None:
    """Negative control: the comparison can fail."""
    shape = SHAPES[1]
    given = operands(shape, torch.float32, device)
    expected, actual = (poisoned_pool(NUM_SLOTS, (shape[1], shape[3], shape[2]), torch.float32, device) for _ in "ab")
    reference.checkpoint(*given, spans=spans_of(checkpoints([(1, 64)], NUM_SLOTS, device), device), pool=expected)
    spans = spans_of(checkpoints([(1, 65)], NUM_SLOTS, device), device)
    kernel.checkpoint(*given, spans=spans, pool=actual)
    with pytest.raises(AssertionError):
        assert_states(actual, expected, spans.slots, torch.float32)


def tokens(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, decay: float = 0.025) -> list[Tensor]:
    """k, v, g and beta, and states to start from: one a chunk and one a sequence; all in memory with gaps."""
    num_key_heads, num_value_heads, key_dim, value_dim = shape
    random, num_tokens = generator(4), sum(LENGTHS)
    k = torch.nn.functional.normalize(torch.randn(num_tokens, num_key_heads, key_dim, generator=random), dim=-1)
    v = torch.randn(num_tokens, num_value_heads, value_dim, generator=random)
    g = -decay * torch.rand(num_tokens, num_value_heads, generator=random)
    beta = torch.rand(num_tokens, num_value_heads, generator=random)
    states = torch.randn(11, num_value_heads, value_dim, key_dim, generator=random)
    made = [k.to(dtype), v.to(dtype), g, beta.to(dtype), states[: sum(-(-each // 64) for each in LENGTHS)].to(dtype)]
    made.append(states[-len(LENGTHS) :].to(dtype))
    return [torch.stack([each, torch.full_like(each, torch.nan)], 1)[:, 0].to(device) for each in made]


WALKED = ((1, 1, 16, 16), (2, 4, 12, 20), (1, 2, 72, 12))
"""As `SHAPES`; a walk has all keys in one block and few values in another, so narrower states suffice."""
ANYWHERE = (*EVERYWHERE, (0, 0), (1, 128))
"""Initial states and chunk ends too: they start from either and take in no token."""


def advance_both(
    given: list[Tensor], spans: Spans, pool_dtype: torch.dtype, *, has_chunks: bool = True, has_initial: bool = True
) -> tuple[Tensor, Tensor]:
    """Pools as the reference fills one in float64, and the kernel one of `pool_dtype`."""
    state_shape, device = given[-1].shape[1:], given[-1].device
    expected = poisoned_pool(NUM_SLOTS, state_shape, torch.float64, device)
    actual = poisoned_pool(NUM_SLOTS, state_shape, pool_dtype, device)
    for run, pool, dtype in ((reference, expected, torch.float64), (kernel, actual, None)):
        k, v, g, beta, chunks, initial = (each.to(dtype or each.dtype) for each in given)
        run.advance(
            k,
            v,
            g,
            beta,
            chunks if has_chunks else None,
            spans=spans,
            pool=pool,
            initial_states=initial if has_initial else None,
        )
    return expected, actual


@pytest.mark.parametrize(("shape", "dtype", "pool_dtype"), pairwise(WALKED, DTYPES, DTYPES))
def test_states_advanced_to_every_kind_of_position(
    shape: tuple[int, ...], dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> None:
    """Narrow inputs cost no precision: all is in float32."""
    where = checkpoints(ANYWHERE, NUM_SLOTS, device)
    spans = spans_after_chunks(where, LENGTHS, 64, device)
    expected, actual = advance_both(tokens(shape, dtype, device), spans, pool_dtype)
    assert_states(actual, expected, spans.slots, pool_dtype)


@pytest.mark.parametrize("has_initial", [True, False])
def test_states_advanced_from_the_start_alone(has_initial: bool, device: torch.device) -> None:
    spans = spans_from_start(checkpoints(((0, 65), (1, 0), (1, 130), (2, 1)), NUM_SLOTS, device), LENGTHS, device)
    given = tokens(WALKED[0], torch.float32, device)
    expected, actual = advance_both(given, spans, torch.float32, has_chunks=False, has_initial=has_initial)
    assert_states(actual, expected, spans.slots, torch.float32)


def test_states_advanced_from_chunks_alone(device: torch.device) -> None:
    spans = spans_of(checkpoints(EVERYWHERE, NUM_SLOTS, device), device)
    given = tokens(WALKED[0], torch.float32, device)
    expected, actual = advance_both(given, spans, torch.float32, has_initial=False)
    assert_states(actual, expected, spans.slots, torch.float32)


def test_strong_decay_leaves_nothing_of_a_state_advanced(device: torch.device) -> None:
    spans = spans_after_chunks(checkpoints(ANYWHERE, NUM_SLOTS, device), LENGTHS, 64, device)
    expected, actual = advance_both(tokens(WALKED[0], torch.float32, device, decay=1e3), spans, torch.float32)
    assert_states(actual, expected, spans.slots, torch.float32)


def test_a_state_advanced_in_its_own_slot(device: torch.device) -> None:
    """A program reads what it writes and nothing else: the pool may hold the states to start from."""
    k, v, g, beta, _, initial_states = tokens(WALKED[0], torch.float32, device)
    spans = spans_from_start(checkpoints(((0, 65), (1, 3), (2, 1), (3, 40)), len(LENGTHS), device), LENGTHS, device)
    spans.slots.copy_(spans.sequences)
    expected, actual = initial_states.clone(), initial_states.clone()
    reference.advance(k, v, g, beta, None, spans=spans, pool=expected, initial_states=initial_states)
    kernel.advance(k, v, g, beta, None, spans=spans, pool=actual, initial_states=actual)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_nothing_to_advance_launches_nothing(device: torch.device) -> None:
    spans = spans_from_start(checkpoints((), NUM_SLOTS, device), LENGTHS, device)
    _, actual = advance_both(tokens(WALKED[0], torch.float32, device), spans, torch.float32)
    assert_states(actual, actual, spans.slots, torch.float32)


def test_a_token_too_few_is_seen(device: torch.device) -> None:
    """Negative control: the comparison can fail."""
    given = tokens(WALKED[0], torch.float32, device)
    expected, _ = advance_both(given, spans_of(checkpoints([(1, 65)], NUM_SLOTS, device), device), torch.float32)
    spans = spans_of(checkpoints([(1, 64)], NUM_SLOTS, device), device)
    _, actual = advance_both(given, spans, torch.float32)
    with pytest.raises(AssertionError):
        assert_states(actual, expected, spans.slots, torch.float32)
