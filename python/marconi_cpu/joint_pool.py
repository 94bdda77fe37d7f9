"""One pool for KV and states (`--enable-unified-memory`) on the CPU platform.

SGLang's pool runs on a CPU unchanged; it lacks an attention backend there that knows that the pool's indices are
names, behind which entries move. So `torch_native` is given places: it writes where the batch's plan says, and reads
rows of places in those of names. It is added to SGLang's lists of backends that look places up themselves. The KV of a
draft model lies in the target's entries and has their names. An entry never has to wait for a pass in flight, or for a
copy to a host, before it moves: on a CPU both have ended when their call returns.

Sources: `srt/layers/attention/torch_native_backend.py`, `srt/arg_groups/kv_cache_hook.py`,
`srt/mem_cache/kv_cache_configurator.py`, `srt/mem_cache/unified_draft_pool.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, update_wrapper
from typing import Any
from unittest.mock import patch

import torch

_ATTENTION = "torch_native"
_KNOWN = "triton"
"""A backend that SGLang knows to look places up."""
_ROWS, _INDICES = 4, 5
"""Positions of two arguments of `_run_sdpa_forward_*`: SGLang's table of requests, and the batch's rows of it."""
_AUDITED = ("_SPEC_VERIFY_AUDITED_BACKENDS", "_SPEC_MHA_AUDITED_BACKENDS", "TRANSLATED_MHA_RAILS")
"""SGLang's lists of backends by which drafts are made and verified in one pool."""


def register() -> None:
    """Add attention by torch to the lists, before SGLang's other modules import them."""
    from sglang.srt.arg_groups import kv_cache_hook

    for name in _AUDITED:
        setattr(kv_cache_hook, name, getattr(kv_cache_hook, name) | {_ATTENTION})


@contextmanager
def resolved_here() -> Iterator[None]:
    """Have SGLang resolve arguments as on this platform, in a process that serves nothing and loads no plugin."""
    from sglang.srt.arg_groups import kv_cache_hook

    handle = kv_cache_hook.handle_page_major_kv_layout
    with ExitStack() as stack:
        for name in _AUDITED:
            known = getattr(kv_cache_hook, name) | {_ATTENTION}
            stack.enter_context(patch.object(kv_cache_hook, name, known))
        around = update_wrapper(partial(around_page_major_layout, handle), handle)
        stack.enter_context(patch.object(kv_cache_hook, handle.__name__, around))
        yield


def around_page_major_layout(handle: Callable[[Any], None], server_args: Any) -> None:
    """Around `handle_page_major_kv_layout`: attention is one of the backends that may be used."""
    from sglang.srt.arg_groups import kv_cache_hook

    backends_of = kv_cache_hook.attention_backends_of
    kv_cache_hook.attention_backends_of = lambda view: [_KNOWN if b == _ATTENTION else b for b in backends_of(view)]
    try:
        handle(server_args)
    finally:
        kv_cache_hook.attention_backends_of = backends_of


def around_reject(reject: Callable[..., None], platform: Any, *, subsystem: str) -> None:
    """Around `reject_out_of_tree_path`: this platform has the pool."""
    if "--enable-unified-memory" not in subsystem:
        reject(platform, subsystem=subsystem)


def around_forward(
    forward: Callable[..., Any],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool = True,
    **kwargs: Any,
) -> Any:
    """Around `TorchNativeAttnBackend.forward_decode`, and of `.forward_extend`: KV is written to places."""
    if _translate_of(backend) is not None and save_kv_cache and k is not None:
        from sglang.srt.mem_cache.memory_pool import KVWriteLoc

        backend.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)
        save_kv_cache = False
    return forward(backend, q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


def around_attention(run: Callable[..., Any], backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `TorchNativeAttnBackend._run_sdpa_forward_extend` and `..._decode`: KV is read from places."""
    if _translate_of(backend) is None:
        return run(backend, *args, **kwargs)
    given = list(args)
    indices = given[_INDICES]
    given[_ROWS] = places_of(backend, given[_ROWS][indices])
    given[_INDICES] = torch.arange(len(indices))
    return run(backend, *given, **kwargs)


def places_of(backend: Any, entries: torch.Tensor) -> torch.Tensor:
    """Where the KV of `entries` of SGLang's table lies, int64 of the same shape."""
    translate = _translate_of(backend)
    entries = entries.to(torch.int64).contiguous()
    return entries if translate is None else translate(entries)


def forget_event(_allocator: Any, *_: Any, **__: Any) -> None:
    """In place of `MultiEndedAllocator`'s `set_latest_forward_done_event`, `set_inflight_forward` and the like."""


def _translate_of(backend: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """From names to places; None for a pool whose indices are places."""
    pool: Any = backend.token_to_kv_pool
    # A draft model's, whose KV lies in the target's entries.
    target = getattr(pool, "host_allocator", None)
    translate: Callable[[torch.Tensor], torch.Tensor]
    if target is not None:
        translate = target.translate_kv_loc
        return translate
    pool = getattr(pool, "full_kv_pool", None)
    if pool is None or not pool.requires_physical_write_loc:
        return None
    translate = pool.host_transfer_translate
    return translate
