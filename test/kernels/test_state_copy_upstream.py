"""A copy across all layers is what SGLang's own kernel does, on a CUDA device."""

import pytest
import torch

from sgl_kernel_ext import state_copy

from .batch import generator


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_copy_is_sglangs_tracking_of_decode_states(dtype: torch.dtype) -> None:
    pytest.importorskip("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
    sglang_copies_alike(dtype, "cuda")


def sglang_copies_alike(dtype: torch.dtype, device: str) -> None:
    from sglang.kernels.ops.mamba.mamba_state_scatter_triton import track_mamba_states_all_layers

    windows = torch.randn(3, 9, 96, 3, generator=generator()).to(device, dtype)
    states = torch.randn(3, 9, 4, 16, 32, generator=generator(1)).to(device)
    sources = torch.tensor([1, 8, 4, 5], device=device)
    destinations = torch.tensor([0, 3, 6, 7], device=device)
    is_tracked = torch.tensor([True, False, True, True], device=device)
    expected = (windows.clone(), states.clone())
    track_mamba_states_all_layers(*expected, sources, is_tracked, destinations, len(sources))
    for pool, theirs in zip((windows, states), expected, strict=True):
        state_copy.copy(pool, torch.where(is_tracked, sources, -1), destinations, slot_dim=1)
        assert torch.equal(pool, theirs)
