"""Stand-ins for the Triton launchers that the served families call, and for what SGLang asks of torch's device.

The families are the gated delta rule (Qwen3.5, Qwen3-Next), Mamba2 (Nemotron-H, Falcon-H1, Granite 4) and short
convolutions (LFM2, Inkling); all that is replaced is in `upstream.toml`.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.layers import dp_attention
from sglang.srt.layers.attention.mamba import mamba as mixer
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.speculative import eagle_utils

from marconi.engine.plugin import touch
from marconi_cpu import convolution, draft_tree, host_copies, joint_pool, paging, upstream, window_dtype

_FILL_VALUE: Final = "get_cpu_graph_seq_len_fill_value"
_TREES: Final = "sgl_kernel.speculative"
_WAIT_MS: Final = 100


def register() -> None:
    """Put the replacements in; SGLang applies the hooks afterwards."""
    touch.register(*upstream.GROUPS)
    paging.register()
    joint_pool.register()
    host_copies.register()
    window_dtype.register()
    vars(sys.modules.setdefault(_TREES, ModuleType(_TREES))).update(
        reconstruct_indices_from_tree_mask=draft_tree.reconstruct_indices_from_tree_mask
    )
    eagle_utils.tree_speculative_sampling_target_only = draft_tree.tree_speculative_sampling_target_only
    eagle_utils.top_k_renorm_prob = draft_tree.top_k_renorm_prob
    eagle_utils.top_p_renorm_prob = draft_tree.top_p_renorm_prob
    for suffix in ("", "_triton"):
        setattr(mixer, f"causal_conv1d_fn{suffix}", convolution.causal_conv1d_fn)
        setattr(mixer, f"causal_conv1d_update{suffix}", convolution.causal_conv1d_update)
    torch.Tensor.pin_memory = _pin_memory  # type: ignore[method-assign,assignment]
    torch.get_device_module = _device_module
    torch.cuda.synchronize = _synchronize
    forward_batch_info._is_cpu = parallel_state._is_cpu = True
    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    setattr(TorchNativeAttnBackend, _FILL_VALUE, _padded_row_tokens)


@functools.cache
def _device_module(device: torch.device | str | None = None) -> ModuleType:
    """Without a device torch gives the module of the accelerator that it was built for, present or not.

    Cached as torch's own is, which its compiler counts on: SGLang compiles what applies a repetition penalty.
    """
    return getattr(torch, torch.device(device or "cpu").type)


def around_event_loop(event_loop: Callable[[Any], None], controller: Any) -> None:
    """Let the controller of data-parallel ranks wait for a request, where it would ask for one without a pause.

    It feeds its watchdog each time before it asks.
    """
    feed, requests = controller.soft_watchdog.feed, controller.recv_from_tokenizer

    def feed_and_wait() -> None:
        feed()
        requests.poll(_WAIT_MS)

    controller.soft_watchdog = SimpleNamespace(feed=feed_and_wait)
    event_loop(controller)


def _padded_row_tokens(_backend: object) -> int:
    """Tokens of a row that stands for none in a batch that is padded to those of other ranks."""
    return 1


def _synchronize(device: object = None) -> None:
    """No device works on after a call has returned."""


def _pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    """Host memory that no device copies from needs no pinning."""
    return tensor
