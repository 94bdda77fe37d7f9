"""Mamba2's checkpoints are the states that SGLang's and mamba-ssm's own kernels make, on a CUDA device."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import mamba2, varlen
from sgl_kernel_ext.checkpoints import Checkpoints, spans_over_batch
from sgl_kernel_ext.state_pool import StateSlots

from . import recurrence
from .batch import cu_seqlens, generator, sequences

LENGTHS = (65, 130, 1, 60, 256, 128)
"""The fifth and the sixth sequence begin with a chunk."""
WHERE = ((0, 1), (0, 65), (1, 63), (1, 130), (2, 1), (3, 60), (4, 1), (4, 65), (4, 256), (5, 127), (5, 128))
SHAPE = (2, 4, 64, 128)
"""Groups, heads, head_dim, state_dim."""
MAX_ERROR = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}
"""Of the largest state: upstream multiplies in TF32 at best and rounds to the inputs' dtype before."""
TF32 = 2.0**-9
"""The most that a product's term loses, of itself, where both factors are cut to 10 bits behind the first."""


def inputs(lengths: Sequence[int], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """x, delta, A, B, C and the initial states."""
    num_groups, num_heads, head_dim, state_dim = SHAPE
    random, num_tokens = generator(3), sum(lengths)
    x = torch.randn(num_tokens, num_heads, head_dim, generator=random).to(device, dtype)
    B, C = (torch.randn(num_tokens, num_groups, state_dim, generator=random).to(device, dtype) for _ in "BC")
    delta = torch.rand(num_tokens, num_heads, generator=random).to(device)
    A = -torch.rand(num_heads, generator=random).to(device) / 40
    initial = torch.randn(len(lengths), num_heads, head_dim, state_dim, generator=random).to(device)
    return x, delta, A, B, C, initial


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    atol = MAX_ERROR[dtype] * expected.float().abs().max().item()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=atol)


@pytest.mark.gpu
@pytest.mark.parametrize("has_initial", [True, False])
@pytest.mark.parametrize("chunk_size", [64, 256])
@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_a_checkpoint_from_sglangs_scan_is_sglangs_own_state_at_that_token(
    dtype: torch.dtype, chunk_size: int, has_initial: bool
) -> None:
    pytest.importorskip("sglang.kernels.ops.mamba.triton_ops.ssd_combined")
    sglang_state_is_the_checkpoint(dtype, chunk_size, has_initial, "cuda")


def sglang_state_is_the_checkpoint(dtype: torch.dtype, chunk_size: int, has_initial: bool, device: str) -> None:
    from sglang.kernels.ops.mamba.triton_ops import ssd_chunk_state, ssd_state_passing

    x, delta, A, B, _, initial = inputs(LENGTHS, dtype, device)
    starts = cu_seqlens(LENGTHS).to(device, torch.int32)
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS), device=device), starts.diff())[None].int()
    offsets = varlen.over_batch(starts, chunk_size).starts % chunk_size
    decay_sums, steps = ssd_chunk_state._chunk_cumsum_fwd(delta[None], A, chunk_size)
    added = ssd_chunk_state._chunk_state_fwd(B[None], x[None], steps, decay_sums, seq_idx=owner)
    chunk_states, _ = ssd_state_passing._state_passing_fwd(
        added.flatten(-2),
        decay_sums,
        initial_states=initial.flatten(-2) if has_initial else None,
        seq_idx=owner,
        chunk_size=chunk_size,
        out_dtype=torch.float32,
        is_cont_batched=True,
        chunk_offsets=offsets,
    )
    chunk_states = chunk_states.unflatten(-1, SHAPE[2:])
    pool = torch.full((len(WHERE), *SHAPE[1:]), torch.nan, device=device)
    where = Checkpoints(*zip(*WHERE, strict=True), range(len(WHERE)))  # type: ignore[arg-type]
    mamba2.checkpoint(
        x,
        steps[0],
        decay_sums[0],
        B,
        chunk_states[0],
        initial_states=initial if has_initial else None,
        chunk_size=chunk_size,
        spans=spans_over_batch(where, LENGTHS, chunk_size, device),
        pool=pool,
    )
    upstream = []
    for sequence, position in WHERE:
        first = starts[sequence]
        bounds = torch.stack([first, first + position])
        own = initial[sequence : sequence + 1] if has_initial else None
        upstream += ssd_chunk_state.chunk_state_varlen(
            B, x, steps[0], decay_sums[0], bounds, chunk_states[0], initial_states=own
        )
    if dtype is not torch.float32:
        for state, expected in zip(pool, upstream, strict=True):
            assert_close(state, expected, dtype)
        return
    # SGLang multiplies in TF32 what is multiplied here in full: ours is no further from the recurrence than SGLang's.
    states = exact_states(x, delta, A, B, initial if has_initial else torch.zeros_like(initial))
    exact = torch.stack([states[sequence][position] for sequence, position in WHERE])
    of_upstream = error_of(torch.stack(upstream), exact)
    assert of_upstream <= TF32
    assert error_of(pool, exact) <= max(of_upstream, 1e-6)


def exact_states(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, initial: Tensor) -> list[Tensor]:
    """Every state of every sequence, one token after the other in float64."""
    x, delta, A, B, initial = (each.cpu() for each in (x, delta, A, B, initial))
    return [
        recurrence.mamba2(x[own], delta[own], A, B[own], B[own], None, initial[i])[1] for i, own in sequences(LENGTHS)
    ]


def error_of(actual: Tensor, exact: Tensor) -> float:
    """Of the largest value."""
    return float((actual.double().cpu() - exact).abs().max() / exact.abs().max())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_a_checkpoint_is_where_mamba_ssm_ends_on_the_tokens_before_it(dtype: torch.dtype) -> None:
    ssd_combined = pytest.importorskip("mamba_ssm.ops.triton.ssd_combined")
    chunk_size, length = 64, 200
    x, delta, A, B, C, initial = inputs((length,), dtype, "cuda")
    on_cpu = mamba2.prefill(
        *(each.cpu() for each in (x, delta, A, B, C)),
        cu_seqlens=cu_seqlens((length,)),
        chunk_size=chunk_size,
        states=StateSlots(initial.cpu(), torch.arange(1)),
    )
    positions = (1, 63, 64, 65, 127, 199, 200)
    pool = torch.full((len(positions), *SHAPE[1:]), torch.nan, device="cuda")
    where = Checkpoints([0] * len(positions), positions, range(len(positions)))
    mamba2.checkpoint(
        x,
        on_cpu.delta.cuda(),
        on_cpu.decay_sums.cuda(),
        B,
        on_cpu.grid_states.cuda(),
        initial_states=initial,
        chunk_size=chunk_size,
        spans=spans_over_batch(where, (length,), chunk_size, "cuda"),
        pool=pool,
    )
    for position, state in zip(positions, pool, strict=True):
        _, expected = ssd_combined.mamba_chunk_scan_combined(
            x[None, :position],
            delta[None, :position],
            A,
            B[None, :position],
            C[None, :position],
            chunk_size,
            initial_states=initial,
            return_final_states=True,
        )
        assert_close(state, expected[0], dtype)
