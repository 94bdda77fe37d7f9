"""The slots of the KV of drafted tokens: SGLang's small kernels over its tables, in torch.

Upstream: `sglang/kernels/ops/speculative/{cache_locs,eagle}.py`, `sglang/kernels/ops/kvcache/cache_move.py` and
`sglang/srt/mem_cache/allocation.py`.
"""

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from marconi_cpu.arguments import require_absent


def assign_extend_cache_locs(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    batch_size: int,
    draft_token_num: int,
    device: object,
) -> Tensor:
    """The entries of the requests' rows from start to end, one after the other: (num_tokens,) int64.

    Not read: the last three arguments size and place what is returned.
    """
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in spans]).long()


def assign_req_to_token_pool_func(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    batch_size: int,
) -> None:
    """Write the requests' rows from start to end, from entries that follow each other in `out_cache_loc`."""
    used = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[used : used + end - start]
        used += end - start


def fill_front_out_cache_loc_func(num_front: Tensor, out_cache_loc: Tensor, front_out_cache_loc: Tensor) -> None:
    """Pack the first num_front[i] entries of request i's part of `out_cache_loc` at the front of the last argument."""
    parts = out_cache_loc.view(num_front.numel(), -1)
    packed = torch.cat([part[:count] for part, count in zip(parts, num_front.tolist(), strict=True)])
    front_out_cache_loc[: len(packed)] = packed


def fill_accept_out_cache_loc_func(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, size: int
) -> None:
    """Pack the entries of the accepted nodes, those of accept_index that are not -1, at the front of the last but one.

    Not read: `size` is the number of elements of `accept_index`.
    """
    packed = out_cache_loc[accept_index[accept_index != -1].long()]
    accept_out_cache_loc[: len(packed)] = packed


def fill_bonus_tokens_func(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int, batch_size: int
) -> None:
    """Write each request's last accepted token; accept_tokens has `accept_stride` a request."""
    rows = torch.arange(batch_size)
    bonus_tokens.copy_(accept_tokens.view(-1)[rows * accept_stride + accept_lens.long() - 1])


def assign_draft_cache_locs_contiguous_func(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: Tensor | None = None,
    mrope: Tensor | None = None,
) -> None:
    """Write the topk * num_cols entries of each request's row behind its tokens to `out_cache_loc`."""
    require_absent("assign_draft_cache_locs_contiguous_func", positions=positions, mrope=mrope)
    ends = seq_lens + topk * num_cols
    found = assign_extend_cache_locs(req_pool_indices, req_to_token, seq_lens, ends, len(seq_lens), num_cols, "cpu")
    out_cache_loc.copy_(found)


def copy_all_layer_kv_cache_func(
    data_ptrs: Tensor,
    strides: Tensor,
    tgt_loc: Tensor,
    src_loc: Tensor,
    num_locs: int,
    num_locs_upper: int,
    kv_copy_config: Mapping[str, int],
) -> None:
    """Copy the first `num_locs` entries of each pool at data_ptrs (num_pools,), of strides (num_pools,) bytes an entry.

    Entries may be both read and written. Not read: the other arguments size a launch grid.
    """
    sources, targets = src_loc[:num_locs].tolist(), tgt_loc[:num_locs].tolist()
    for start, num_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        read = [ctypes.string_at(start + source * num_bytes, num_bytes) for source in sources]
        for target, content in zip(targets, read, strict=True):
            ctypes.memmove(start + target * num_bytes, content, num_bytes)
