"""The kernel of Kimi Delta Attention writes the states that its reference does, and nothing else."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.checkpoints import Checkpoints, Spans, last_chunks, spans_per_sequence
from sgl_kernel_ext.kda import kernel, prefill, reference

from .batch import cu_seqlens, generator
from .conftest import IS_INTERPRETED
from .kernel_checks import (
    DTYPES,
    EVERYWHERE,
    LENGTHS,
    MAX_ERROR,
    assert_states,
    checkpoints,
    narrowest,
    pairwise,
    poisoned_pool,
)

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


def spans_of(where: Checkpoints, device: torch.device, snapshots: Sequence[int] = ()) -> Spans:
    return spans_per_sequence(where, LENGTHS, 64, device, snapshots)


def rows(lengths: Sequence[int]) -> list[int]:
    """The row of each sequence's first chunk."""
    return [0, *accumulate(-(-length // 64) for length in lengths)][:-1]


def pools(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """One for the reference, one for the kernel."""
    expected, actual = (poisoned_pool(NUM_SLOTS, (shape[1], shape[3], shape[2]), dtype, device) for _ in range(2))
    return expected, actual


@pytest.mark.parametrize(("shape", "dtype", "pool_dtype"), pairwise(SHAPES, DTYPES, DTYPES))
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_starts_from_a_snapshot_reads_no_chunk_state(dtype: torch.dtype, device: torch.device) -> None:
    """Both start from the same states, which the one finds in the snapshots alone, the other in the chunk states."""
    shape = SHAPES[1]
    k, u, sums, chunk_states = operands(shape, dtype, device)
    where = checkpoints(EVERYWHERE, NUM_SLOTS, device)
    copied = last_chunks(where, len(LENGTHS), 64)
    at = [first + chunk for first, chunk in zip(rows(LENGTHS), copied, strict=True)]
    snapshots = chunk_states[at].float()
    expected, actual = pools(shape, torch.float32, device)
    reference.checkpoint(k, u, sums, chunk_states, spans=spans_of(where, device), pool=expected)
    chunk_states[at] = torch.nan
    spans = spans_of(where, device, copied)
    for checkpoint in (reference.checkpoint, kernel.checkpoint):
        actual.fill_(torch.nan)
        checkpoint(k, u, sums, chunk_states, spans=spans, pool=actual, snapshots=snapshots)
        assert_states(actual, expected, spans.slots, dtype)


class SglangsPrefill:
    """SGLang's chunk kernel of KDA over `LENGTHS`, all of whose operands are exact in float16.

    Decays are halves, so that keys scaled to any later token lose nothing, and only sums in float32 are rounded. The
    interpreter knows `tl.exp2` by that name alone.
    """

    heads, dim = 2, 64

    def __init__(self, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
        self.module = pytest.importorskip("sglang.kernels.ops.attention.fla.chunk_delta_h")
        if IS_INTERPRETED:
            monkeypatch.setattr(self.module, "exp2", lambda x: tl.math.exp2(x))
        random, shape = generator(5), (sum(LENGTHS), self.heads, self.dim)
        self.k, w, u = (torch.randn(shape, generator=random).to(device) for _ in range(3))
        self.k = torch.nn.functional.normalize(self.k, dim=-1).half()
        self.w, self.u = (0.1 * torch.nn.functional.normalize(w, dim=-1)).half(), u.half()
        halves = (torch.rand(shape, generator=random) < 1 / 32).float()
        sums = [part.cumsum(0) for one in halves.split(LENGTHS) for part in one.split(64)]
        self.sums = -torch.cat(sums).to(device)
        self.initial = torch.randn(len(LENGTHS), self.heads, self.dim, self.dim, generator=random).to(device)

    def run(self, sequence: int | None, position: int = 0, **tracked: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Chunk states, corrected values and final states of one sequence until `position`, or of all."""
        lengths = LENGTHS if sequence is None else (position,)
        first = 0 if sequence is None else sum(LENGTHS[:sequence])
        at = slice(first, first + sum(lengths))
        k, w, u, sums = (each[at] for each in (self.k, self.w, self.u, self.sums))
        to_end = [part[-1:] - part for one in sums.split(lengths) for part in one.split(64)]
        states = (self.initial if sequence is None else self.initial[[sequence]]).clone()
        chunk_states, values = self.module.chunk_gated_delta_rule_fwd_h(
            k=(k * torch.cat(to_end).exp2()).half()[None],
            w=w[None].contiguous(),
            u=u[None].contiguous(),
            gk=sums[None].contiguous(),
            initial_state=states,
            initial_state_indices=torch.arange(len(lengths), dtype=torch.int32, device=k.device),
            cu_seqlens=cu_seqlens(lengths).to(k.device, torch.int32),
            use_exp2=True,
            **tracked,
        )
        return chunk_states[0], values[0], states


def test_states_from_sglangs_snapshots_are_those_it_ends_in_and_others_are_rounded(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: of the same prefill, states that start from rows in float16 are off by its rounding."""
    theirs = SglangsPrefill(device, monkeypatch)
    where = checkpoints(EVERYWHERE, NUM_SLOTS, device)
    copied = last_chunks(where, len(LENGTHS), 64)
    snapshots = torch.full_like(theirs.initial, torch.nan)
    chunks = torch.tensor(copied, dtype=torch.int32, device=device)
    chunk_states, values, _ = theirs.run(None, track_state=snapshots, track_chunk_idx=chunks)
    assert chunk_states.dtype == torch.float16
    at = [first + chunk for first, chunk in zip(rows(LENGTHS), copied, strict=True)]
    assert torch.equal(snapshots.half(), chunk_states[at])
    expected = torch.cat([theirs.run(sequence, position)[2] for sequence, position in EVERYWHERE])

    def off(checkpoint: Callable[..., None], spans: Spans) -> Tensor:
        """How far each is off, of the largest value."""
        _, pool = pools((2, theirs.heads, theirs.dim, theirs.dim), torch.float32, device)
        given = theirs.k, values, theirs.sums, chunk_states
        checkpoint(*given, spans=spans, pool=pool, log_base=2.0, snapshots=snapshots)
        return (pool[spans.slots.long()] - expected).abs().flatten(1).amax(1) / expected.abs().max()

    from_snapshot = torch.tensor([(p - 1) // 64 == copied[sequence] for sequence, p in EVERYWHERE], device=device)
    for checkpoint in (reference.checkpoint, kernel.checkpoint):
        found = off(checkpoint, spans_of(where, device, copied))
        assert found[from_snapshot].max() < MAX_ERROR[torch.float32]
        assert found[~from_snapshot].min() > 10 * MAX_ERROR[torch.float32]
        rounded = off(checkpoint, spans_of(where, device))
        assert rounded.min() > 10 * MAX_ERROR[torch.float32]
        assert rounded.max() < MAX_ERROR[torch.float16]


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
