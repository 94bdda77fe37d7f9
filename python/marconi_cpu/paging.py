"""The places of tokens in pages of KV, in place of the Triton kernels of SGLang's one pool.

Its two pools have functions for a CPU, which the one pool (`--enable-unified-memory`) does not call; they are called
for it here. Source: `srt/mem_cache/allocator/unified_sub_pool.py`, `srt/mem_cache/allocator/paged.py`.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.allocator import unified_sub_pool
from sglang.srt.mem_cache.allocator.paged import alloc_decode_naive, alloc_extend_naive
from torch import Tensor


class _Launched:
    """A function in place of a kernel, whose grid of one block a sequence it does not need."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return self._function


def _extend(
    prefix_lens: Tensor, seq_lens: Tensor, last_loc: Tensor, free: Tensor, out: Tensor, _bs: int, page: int
) -> None:
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, free, out, page, out.device)


def _decode(seq_lens: Tensor, last_loc: Tensor, free: Tensor, out: Tensor, _bs: int, page: int) -> None:
    num_new_pages = int(((seq_lens - 1) % page == 0).sum())
    alloc_decode_naive(seq_lens, last_loc, free, out, page, num_new_pages)


def register() -> None:
    """Put them in."""
    unified_sub_pool.alloc_extend_kernel = _Launched(_extend)
    unified_sub_pool.alloc_decode_kernel = _Launched(_decode)
