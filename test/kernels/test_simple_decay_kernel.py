"""The kernel of the constant decay writes the states that its reference does, and nothing else."""

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext.checkpoints import Checkpoints, Spans, spans_from_start, spans_over_batch, spans_per_sequence
from sgl_kernel_ext.simple_decay import kernel, reference

from .batch import generator
from .kernel_checks import DTYPES, EVERYWHERE, LENGTHS, assert_states, checkpoints, narrowest, poisoned_pool

SHAPES = ((1, 2, 16, 16), (2, 4, 12, 20), (2, 2, 64, 128), (1, 3, 80, 72))
"""Key heads, value heads, key_dim, value_dim: grouped, wider than a block, and no power of two."""
NUM_SLOTS = 13
ANYWHERE = (*EVERYWHERE, (0, 0), (1, 128))
"""Initial states and chunk ends too."""


def tokens(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """k, v, log_decay, and states to start from: one a chunk and one a sequence; in memory with gaps."""
    num_key_heads, num_heads, key_dim, value_dim = shape
    random, num_tokens = generator(4), sum(LENGTHS)
    k = torch.randn(num_tokens, num_key_heads, key_dim, generator=random) * key_dim**-0.5
    v = torch.randn(num_tokens, num_heads, value_dim, generator=random)
    # The first head forgets in two tokens and reads few of a long span; the last forgets nothing.
    log_decay = torch.cat([-2.0 / 16 ** torch.arange(num_heads - 1), torch.zeros(1)])
    states = torch.randn(12, num_heads, key_dim, value_dim, generator=random)
    num_chunks = sum(-(-each // 64) for each in LENGTHS)
    made = [k.to(dtype), v.to(dtype), log_decay, states[:num_chunks].to(dtype), states[-len(LENGTHS) :].to(dtype)]
    return [torch.stack([each, torch.full_like(each, torch.nan)], 1)[:, 0].to(device) for each in made]


def take_both(
    given: list[Tensor], spans: Spans, pool_dtype: torch.dtype, *, has_chunks: bool = True, has_initial: bool = True
) -> tuple[Tensor, Tensor]:
    """Pools as the reference fills one in float64, and the kernel one of `pool_dtype`."""
    state_shape, device = given[-1].shape[1:], given[-1].device
    expected = poisoned_pool(NUM_SLOTS, state_shape, torch.float64, device)
    actual = poisoned_pool(NUM_SLOTS, state_shape, pool_dtype, device)
    for run, pool, dtype in ((reference, expected, torch.float64), (kernel, actual, None)):
        k, v, log_decay, chunks, initial = (each.to(dtype or each.dtype) for each in given)
        run.checkpoint(
            k,
            v,
            log_decay,
            chunks if has_chunks else None,
            spans=spans,
            pool=pool,
            initial_states=initial if has_initial else None,
        )
    return expected, actual


@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_states_at_every_kind_of_position(
    shape: tuple[int, ...], dtype: torch.dtype, pool_dtype: torch.dtype, device: torch.device
) -> None:
    """On the grid of the batch, where spans start from chunks and from initial states."""
    spans = spans_over_batch(checkpoints(ANYWHERE, NUM_SLOTS, device), LENGTHS, 64, device)
    assert spans.has_no_chunk
    assert spans.num_chunks
    expected, actual = take_both(tokens(shape, dtype, device), spans, pool_dtype)
    assert_states(actual, expected, spans.slots, narrowest(dtype, pool_dtype))


@pytest.mark.parametrize("has_initial", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_states_from_the_start_of_their_sequences(
    shape: tuple[int, ...], has_initial: bool, device: torch.device
) -> None:
    spans = spans_from_start(checkpoints(ANYWHERE, NUM_SLOTS, device), LENGTHS, device)
    given = tokens(shape, torch.float32, device)
    expected, actual = take_both(given, spans, torch.float32, has_chunks=False, has_initial=has_initial)
    assert_states(actual, expected, spans.slots, torch.float32)


def test_states_from_chunks_alone(device: torch.device) -> None:
    spans = spans_per_sequence(checkpoints(EVERYWHERE, NUM_SLOTS, device), LENGTHS, 64, device)
    expected, actual = take_both(tokens(SHAPES[1], torch.float32, device), spans, torch.float32, has_initial=False)
    assert_states(actual, expected, spans.slots, torch.float32)


def test_a_head_that_forgets_reads_nothing_that_weighs_nothing(device: torch.device) -> None:
    """Tokens further behind than float32 can weigh are not read: not even NaN among them shows."""
    k, v, log_decay, _, _ = tokens(SHAPES[0], torch.float32, device)
    num_tokens, pool = sum(LENGTHS), poisoned_pool(1, (2, 16, 16), torch.float32, device)
    log_decay = torch.full_like(log_decay, -2.0)
    expected = torch.zeros(1, 2, 16, 16, device=device)
    spans = spans_from_start(Checkpoints([0], [num_tokens], [0]), [num_tokens], device)
    reference.checkpoint(k, v, log_decay, None, spans=spans, pool=expected)
    v[: num_tokens - 60] = torch.nan
    kernel.checkpoint(k, v, log_decay, None, spans=spans, pool=pool, initial_states=torch.full_like(pool, torch.nan))
    assert_states(pool, expected, spans.slots, torch.float32)


def test_a_state_taken_on_in_its_own_slot(device: torch.device) -> None:
    """A program reads what it writes and nothing else: the pool may hold the states to start from."""
    k, v, log_decay, _, initial_states = tokens(SHAPES[3], torch.float32, device)
    spans = spans_from_start(checkpoints(((0, 65), (1, 3), (2, 1), (3, 40)), len(LENGTHS), device), LENGTHS, device)
    spans.slots.copy_(spans.sequences)
    expected, actual = initial_states.clone(), initial_states.clone()
    reference.checkpoint(k, v, log_decay, None, spans=spans, pool=expected, initial_states=initial_states)
    kernel.checkpoint(k, v, log_decay, None, spans=spans, pool=actual, initial_states=actual)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-6 * expected.abs().max().item())


def test_nothing_to_keep_launches_nothing(device: torch.device) -> None:
    spans = spans_from_start(checkpoints((), NUM_SLOTS, device), LENGTHS, device)
    _, actual = take_both(tokens(SHAPES[0], torch.float32, device), spans, torch.float32)
    assert_states(actual, actual, spans.slots, torch.float32)


def test_a_slot_that_only_a_device_knows_to_be_outside_the_pool_gets_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tokens(SHAPES[1], torch.float32, device)
    spans = spans_from_start(checkpoints(((0, 5), (1, 7), (2, 1)), NUM_SLOTS, device), LENGTHS, device)
    expected, _ = take_both(given, spans, torch.float32)
    outside = torch.tensor([0, 2], device=device)
    expected[spans.slots[outside]] = torch.nan
    kept = spans.slots[1:2].clone()
    spans.slots[outside] = torch.tensor([-1, NUM_SLOTS], device=device)
    actual = poisoned_pool(NUM_SLOTS, given[-1].shape[1:], torch.float32, device)
    monkeypatch.setattr(Spans, "require_slots", lambda *_: None)
    kernel.checkpoint(*given[:3], None, spans=spans, pool=actual, initial_states=given[-1])
    assert_states(actual, expected, kept, torch.float32)


def test_a_token_too_few_is_seen(device: torch.device) -> None:
    """Negative control: the comparison can fail."""
    given = tokens(SHAPES[1], torch.float32, device)
    expected, _ = take_both(
        given, spans_from_start(checkpoints([(1, 65)], NUM_SLOTS, device), LENGTHS, device), torch.float32
    )
    spans = spans_from_start(checkpoints([(1, 64)], NUM_SLOTS, device), LENGTHS, device)
    _, actual = take_both(given, spans, torch.float32)
    with pytest.raises(AssertionError):
        assert_states(actual, expected, spans.slots, torch.float32)
