"""The short convolution's checkpoints are the windows that SGLang's own kernel leaves, on a CUDA device."""

import pytest
import torch

from sgl_kernel_ext import short_conv
from sgl_kernel_ext.checkpoints import Checkpoints, spans_from_start
from sgl_kernel_ext.state_pool import StateSlots

from .batch import cu_seqlens, generator

LENGTHS = (65, 130, 1)
WHERE = ((0, 1), (0, 2), (0, 3), (0, 65), (1, 1), (1, 64), (1, 130), (2, 1))
NUM_CHANNELS = 512


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_checkpoint_is_the_window_that_sglangs_kernel_leaves_on_the_tokens_before_it(dtype: torch.dtype) -> None:
    pytest.importorskip("sglang.kernels.ops.mamba.causal_conv1d_triton")
    sglang_window_is_the_checkpoint(dtype, "cuda")


def sglang_window_is_the_checkpoint(dtype: torch.dtype, device: str) -> None:
    from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn

    random = generator(3)
    x = torch.randn(sum(LENGTHS), NUM_CHANNELS, generator=random).to(device, dtype)
    weight = torch.randn(NUM_CHANNELS, 4, generator=random).to(device, dtype)
    windows = torch.randn(len(LENGTHS), NUM_CHANNELS, 3, generator=random).to(device, dtype)
    has_initial_state = torch.tensor([True, False, True], device=device)
    pool = torch.full((len(WHERE), NUM_CHANNELS, 3), torch.nan, dtype=dtype, device=device)
    where = Checkpoints(*zip(*WHERE, strict=True), range(len(WHERE)))  # type: ignore[arg-type]
    states = StateSlots(windows, torch.arange(len(LENGTHS), device=device), has_initial_state)
    short_conv.checkpoint(x, states=states, spans=spans_from_start(where, LENGTHS, device), pool=pool)
    first = cu_seqlens(LENGTHS).tolist()
    for (sequence, position), window in zip(WHERE, pool, strict=True):
        own = windows[sequence : sequence + 1].clone()
        causal_conv1d_fn(
            x[first[sequence] : first[sequence] + position].T,
            weight,
            None,
            own,
            torch.tensor([0, position], dtype=torch.int32, device=device),
            [position],
            cache_indices=torch.zeros(1, dtype=torch.int32, device=device),
            has_initial_state=has_initial_state[sequence : sequence + 1],
        )
        assert torch.equal(window, own[0])
