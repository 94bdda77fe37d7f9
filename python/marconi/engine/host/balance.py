"""Whether everything that the pools lend is somewhere, once: free, held by the tree, or in use by a request in flight.

    KV, in pages      free + tree + of each request [cache_protected_len, kv_allocated_len) of its row  = pool
    state slots       free + tree + of each request its working and tracking slots, and those planned   = pool
    rows              free + requests                                                                   = rows
    locks             on the tree's nodes                                                               = of requests

Each side is held index by index, not by its count alone. Source of the sums: `self_check_during_busy` in
`srt/managers/scheduler_components/invariant_checker.py`, which does not count slots while requests run.
"""

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from marconi.engine.run import run_of


def check_balance(cache: Any, in_flight: Collection[Any]) -> None:
    """Raise `AssertionError` unless `cache`, stock or ours, and the requests `in_flight` account for all memory."""
    _check_tree(cache, in_flight)
    kv, slots, rows = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_allocator, cache.req_to_token_pool
    page = kv.page_size
    private = [_private_kv(cache, req) // page for req in in_flight]
    held = cache.all_values_flatten().numpy()
    assert len(np.unique(held)) == len(held), "the tree holds KV twice"
    pages = {"free": kv.get_all_free_pages().numpy(), "tree": np.unique(held // page)}
    pages |= {req.rid: np.unique(own) for req, own in zip(in_flight, private, strict=True)}
    _check_partition("KV pages", pages, kv.size // page)
    states = {"free": slots.free_slots.numpy(), "tree": cache.all_mamba_values_flatten().numpy()}
    states |= {req.rid: np.array(_own_slots(req), dtype=np.int64) for req in in_flight}
    _check_partition("state slots", states, slots.size)
    assert rows.available_size() + len(in_flight) == rows.size, f"{rows.available_size()} rows free"
    num_private = sum(-(-req.kv.kv_allocated_len // page) * page - req.kv.cache_protected_len for req in in_flight)
    num_tokens = kv.available_size() + cache.full_evictable_size() + cache.full_protected_size() + num_private
    assert num_tokens == kv.size, f"{num_tokens} tokens free, evictable, protected or in use, of {kv.size}"
    num_slots = slots.available_size() + cache.mamba_evictable_size() + cache.mamba_protected_size()
    num_slots += sum(len(_own_slots(req)) for req in in_flight)
    assert num_slots == slots.size, f"{num_slots} slots free, evictable, protected or in use, of {slots.size}"


def _check_tree(cache: Any, in_flight: Collection[Any]) -> None:
    served = getattr(cache.tree_core, "served", None)
    if served is not None:
        cache.sanity_check()
        num_locks = sum(node.num_locks for node in served.tree.nodes())
        num_held = sum(req.lock is not None and not cache.is_root(req.lock.node) for req in in_flight)
        assert num_locks == num_held, f"{num_locks} locks on the tree, {num_held} held by requests"
    if not in_flight:
        # Stock's own check wants nothing locked.
        cache.sanity_check()
        assert cache.protected_size() == cache.mamba_protected_size() == 0, "something is locked, by nobody"


def _private_kv(cache: Any, req: Any) -> np.ndarray[Any, Any]:
    """Indices of a request's own KV; what it shares must be the tree's."""
    kv = req.kv
    row: torch.Tensor = cache.req_to_token_pool.req_to_token[kv.req_pool_idx]
    if kv.cache_protected_len:
        path = cache.path_device_indices(req.last_node)[: kv.cache_protected_len]
        assert torch.equal(path, row[: kv.cache_protected_len].to(path.dtype)), f"{req.rid} shares what is not held"
    private: np.ndarray[Any, Any] = row[kv.cache_protected_len : kv.kv_allocated_len].numpy()
    return private


def _own_slots(req: Any) -> list[int]:
    kv, run = req.kv, run_of(req)
    own = [int(kv.mamba_pool_idx)] if kv.holds_mamba else []
    if kv.mamba_ping_pong_track_buffer is not None:
        own += kv.mamba_ping_pong_track_buffer.tolist()
    if run is not None:
        own += [int(checkpoint.slot) for checkpoint in run.checkpoints.values()]
    return own


def _check_partition(name: str, parts: dict[str, np.ndarray[Any, Any]], size: int) -> None:
    """Every number from 1 to `size` is in one of `parts`, once."""
    counts = np.bincount(np.concatenate(list(parts.values())), minlength=size + 1)
    twice = np.flatnonzero(counts > 1)
    if len(twice):
        owners = [part for part, numbers in parts.items() if twice[0] in numbers]
        raise AssertionError(f"{name}: {len(twice)} lent twice, first {twice[0]}, to {' and '.join(owners)}")
    lost = np.flatnonzero(counts[1 : size + 1] == 0) + 1
    assert not len(lost), f"{name}: {len(lost)} of {size} lost, first {lost[0]}"
    assert len(counts) == size + 1, f"{name}: one of {len(counts) - 1}, of {size}"
    assert not counts[0], f"{name}: one numbered 0"
