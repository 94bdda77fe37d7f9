"""SGLang's one pool for KV and states (`--enable-unified-memory`), on the host's memory.

Its sizes are real: entries are moved in the buffer as on a device, by SGLang's own code for a CPU. They are as small as
its layout gets, with a state of 64 tokens' bytes.

Source: `srt/mem_cache/unified_memory_pool.py:init_unified_mamba_pools`.
"""

from types import SimpleNamespace
from typing import Any, Final

import torch

from marconi_cpu import paging

KV_BYTES_PER_TOKEN: Final = 32
STATE_BYTES: Final = 64 * KV_BYTES_PER_TOKEN


def num_moved(cache: Any) -> int:
    """Entries that SGLang has moved to close up what was freed in the one pool of `cache`."""
    kv = cache.token_to_kv_pool_allocator
    return sum(side._stats_n_flush_moves for side in (kv.full_attn_allocator, kv.mamba_allocator))


def joint_pools(
    *,
    num_kv_tokens: int,
    num_state_slots: int,
    page_tokens: int,
    max_context_tokens: int,
    num_rows: int,
    tracks: bool,
) -> Any:
    """SGLang's bundle of pools over a buffer of the bytes of so many tokens and slots; requests track states or not."""
    from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools

    paging.register()
    states = SimpleNamespace(
        layers=[0],
        shape=SimpleNamespace(conv=[(4, 16)], temporal=(1, 15, 32)),
        dtype=SimpleNamespace(conv=torch.bfloat16, temporal=torch.float32),
    )
    return init_unified_mamba_pools(
        device="cpu",
        kv_cache_dtype=torch.float16,
        head_num=1,
        head_dim=8,
        page_size=page_tokens,
        start_layer=0,
        end_layer=2,
        is_draft_worker=False,
        use_mla_backend=False,
        mamba_layer_ids=[0],
        full_attention_layer_ids=[1],
        mamba2_cache_params=states,
        model_context_len=max_context_tokens,
        extra_max_context_len=0,
        max_total_num_tokens=num_kv_tokens,
        max_mamba_cache_size=num_state_slots,
        max_num_reqs=num_rows,
        enable_memory_saver=False,
        enable_mamba_extra_buffer=tracks,
        enable_mamba_extra_buffer_lazy=False,
        speculative_num_draft_tokens=None,
        disable_overlap_schedule=not tracks,
        need_sort=False,
        lazy_compaction=True,
    )
