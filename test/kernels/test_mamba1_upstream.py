"""Mamba1's checkpoints are the states that SGLang's and mamba-ssm's decode kernels come to, on a CUDA device.

SGLang prefills Mamba1 in torch, token by token; the compiled scan of mamba-ssm stores no state but the last. Their
decode kernels, run over the tokens, do.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sgl_kernel_ext import mamba1
from sgl_kernel_ext.checkpoints import Checkpoints, spans_from_start

from .batch import generator

POSITIONS = (0, 1, 63, 64, 65, 127, 130)
SHAPE = (96, 16)
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
"""Of the largest state: both compute in float32 from the same inputs and keep a float32 state."""


def inputs(dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """x, delta, A, B and the initial state of one sequence."""
    random, num_tokens = generator(3), max(POSITIONS)
    x = torch.randn(num_tokens, SHAPE[0], generator=random).to(device, dtype)
    delta = torch.rand(num_tokens, SHAPE[0], generator=random).to(device, dtype)
    A = -torch.rand(SHAPE, generator=random).to(device) / 40
    B = torch.randn(num_tokens, SHAPE[1], generator=random).to(device, dtype)
    return x, delta, A, B, torch.randn(1, *SHAPE, generator=random).to(device)


def assert_decoding_comes_to_the_checkpoints(
    dtype: torch.dtype, device: str, decode: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
) -> None:
    """`decode(state, x, delta, A, B)` advances the state (1, num_channels, state_dim) by one token in place."""
    x, delta, A, B, initial = inputs(dtype, device)
    pool = torch.full((len(POSITIONS), *SHAPE), torch.nan, device=device)
    where = Checkpoints([0] * len(POSITIONS), POSITIONS, range(len(POSITIONS)))
    spans = spans_from_start(where, (len(x),), device)
    mamba1.checkpoint(x, delta, A, B, initial_states=initial, spans=spans, pool=pool)
    state = initial.clone()
    for position in range(len(x) + 1):
        if position in POSITIONS:
            actual = pool[POSITIONS.index(position)]
            atol = MAX_ERROR[dtype] * state.abs().max().item()
            torch.testing.assert_close(actual, state[0], rtol=0, atol=atol)
        if position < len(x):
            token = slice(position, position + 1)
            decode(state, x[token], delta[token], A, B[token])


def sglang_decode(state: Tensor, x: Tensor, delta: Tensor, A: Tensor, B: Tensor) -> None:
    """As SGLang decodes Mamba1: channels are heads of one value."""
    from sglang.kernels.ops.mamba.triton_ops.mamba_ssm import selective_state_update

    selective_state_update(
        state[:, :, None],
        x[..., None],
        delta[..., None],
        A[:, None],
        B[:, None],
        B[:, None],
        torch.zeros_like(A[:, :1]),
        dt_bias=torch.zeros_like(A[:, :1]),
        out=torch.empty_like(x)[..., None],
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_a_checkpoint_is_where_sglang_comes_to_by_decoding(dtype: torch.dtype) -> None:
    pytest.importorskip("sglang.kernels.ops.mamba.triton_ops.mamba_ssm")
    assert_decoding_comes_to_the_checkpoints(dtype, "cuda", sglang_decode)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", MAX_ERROR)
def test_a_checkpoint_is_where_mamba_ssm_comes_to_by_decoding(dtype: torch.dtype) -> None:
    module = pytest.importorskip("mamba_ssm.ops.triton.selective_state_update")

    def decode(state: Tensor, x: Tensor, delta: Tensor, A: Tensor, B: Tensor) -> None:
        module.selective_state_update(state, x, delta, A, B, B)

    assert_decoding_comes_to_the_checkpoints(dtype, "cuda", decode)
