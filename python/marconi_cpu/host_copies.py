"""Copies between the device's pools and those of SGLang's host tier, where both are the host's memory.

For `--hicache-io-backend direct` and `--hicache-mem-layout page_first_direct`, which the platform sets: on the device a
layer's rows stand together, on the host all layers of a page.

    device    [layer][index, ...]                      host    [index // page, layer, index % page, ...]

Indices are of tokens, or of state slots, of which a page holds one. SGLang's own copies of this layout want a layer's
rows one behind another; these step over what lies between those of one pool for KV and states, so that the layout stays
where SGLang would choose its kernels'. Source of the names and their order of arguments:
`sgl_kernel.kvcacheio`, as `srt/mem_cache/pool_host/mha.py` and `srt/mem_cache/pool_host/mamba.py` call it.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from sglang.srt.arg_groups import hicache_hook
from sglang.srt.mem_cache.pool_host import base, mamba, mha, mla
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

RESERVE_BYTES: Final = 1 << 30
"""Memory that SGLang leaves to others beside a host tier: its 10 GiB are more than many a machine without a GPU has."""


def register() -> None:
    """Let SGLang's host pools take their memory and make their copies here."""
    ALLOC_MEMORY_FUNCS["cpu"] = allocate
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVE_BYTES
    base.HostKVCache._require_packed_device_rows = _step_over
    base.HostKVCache.pin_memory = property(lambda _pool: False, lambda _pool, _is_pinned: None)
    hicache_hook.resolve_unified_memory_layout_io = _keep_layout
    for pool in (mha, mla, mamba):
        for copy in (transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
            setattr(pool, copy.__name__, copy)


def _step_over(_pool: Any, _kernel: str) -> None:
    """In place of `HostKVCache._require_packed_device_rows`: rows may lie apart."""


def _keep_layout(_server_args: Any) -> None:
    """In place of `resolve_unified_memory_layout_io`: the layout serves one pool as well."""


def allocate(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any, *_: Any, **__: Any
) -> torch.Tensor:
    """Memory of the host, which needs no pinning for a device that is the host."""
    buffer: torch.Tensor = allocator.allocate(dims, dtype=dtype, device=device)
    return buffer


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Load rows of layer `layer_id` from the host's buffers `src_ptrs` to that layer's on the device, `dst_ptrs`."""
    src_indices = src_indices.long()
    for host, device in zip(src_ptrs, dst_ptrs, strict=True):
        rows = host[src_indices // page_size, layer_id, src_indices % page_size]
        device[dst_indices.long()] = rows.view(len(rows), *device.shape[1:])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Back up rows of every layer: `src_ptrs` are the layers' buffers for each of the host's `dst_ptrs`, in order."""
    src_indices, dst_indices = src_indices.long(), dst_indices.long()
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for number, device in enumerate(src_ptrs):
        host, layer = dst_ptrs[number // num_layers], number % num_layers
        rows = device[src_indices]
        host[dst_indices // page_size, layer, dst_indices % page_size] = rows.view(len(rows), *host.shape[3:])
