"""Whether everything that the pools lend is somewhere, once: free, held by the tree, or in use by a request in flight.

    KV, in pages      free + tree + of each request [cache_protected_len, kv_allocated_len) of its row  = pool
    state slots       free + tree + of each request its working and tracking slots, and those planned   = pool
    checkpoint slots  free + tree + promised, of checkpoints in int8, whose tree holds no state slots   = pool
    rows              free + requests                                                                   = rows
    locks             on the tree's nodes                                                               = of requests

Each side is held index by index, not by its count alone. In one pool the indices are names that outlive a move, and
the bytes behind them add up to the pool's. Source of the sums: `self_check_during_busy` in
`srt/managers/scheduler_components/invariant_checker.py`, which does not count slots while requests run.
"""

import operator
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from marconi.engine.cache.scheduler import notes_of

if TYPE_CHECKING:
    from marconi.engine.joint.pools import JointMemory


def check_balance(cache: Any, in_flight: Collection[Any]) -> None:
    """Raise `AssertionError` unless `cache`, stock or ours, and the requests `in_flight` account for all memory."""
    from marconi.engine.joint.pools import JointMemory

    _check_tree(cache, in_flight)
    kv, slots, rows = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.mamba_allocator, cache.req_to_token_pool
    page = kv.page_size
    private = [_private_kv(cache, req) // page for req in in_flight]
    held = cache.all_values_flatten().numpy()
    assert len(np.unique(held)) == len(held), "the tree holds KV twice"
    joint = JointMemory.of(kv)
    of_kv, of_states = _lent(kv, slots, page) if joint is None else _lent_jointly(kv)
    pages = {"free": of_kv.free, "tree": np.unique(held // page)}
    pages |= {req.rid: np.unique(own) for req, own in zip(in_flight, private, strict=True)}
    _check_partition("KV pages", pages, of_kv.numbers)
    checkpoints, held_states = rows.mamba_ckpt_pool, cache.all_mamba_values_flatten().numpy()
    if checkpoints is not None:
        _check_checkpoints(cache, checkpoints.allocator, held_states, in_flight)
        held_states = held_states[:0]
    states = {"free": of_states.free, "tree": held_states}
    states |= {req.rid: np.array(_own_slots(req), dtype=np.int64) for req in in_flight}
    _check_partition("state slots", states, of_states.numbers)
    assert rows.available_size() + len(in_flight) == rows.size, f"{rows.available_size()} rows free"
    num_private = sum(-(-req.kv.kv_allocated_len // page) * page - req.kv.cache_protected_len for req in in_flight)
    num_tokens = kv.available_size() + cache.full_evictable_size() + cache.full_protected_size() + num_private
    assert num_tokens == kv.size, f"{num_tokens} tokens free, evictable, protected or in use, of {kv.size}"
    num_slots = slots.available_size() + len(held_states)
    if checkpoints is None:
        num_slots = slots.available_size() + cache.mamba_evictable_size() + cache.mamba_protected_size()
    num_slots += sum(len(_own_slots(req)) for req in in_flight)
    assert num_slots == slots.size, f"{num_slots} slots free, evictable, protected or in use, of {slots.size}"
    if getattr(cache.tree_core, "rows", None) is not None:
        _check_host(cache)
    if joint is not None:
        _check_bytes(joint, kv, len(held) + num_private, sum(map(len, states.values())) - len(of_states.free))


class _Lent(NamedTuple):
    """Pages or slots of a pool."""

    free: np.ndarray[Any, Any]
    """Their numbers, of"""
    numbers: range


def _lent(kv: Any, slots: Any, page: int) -> tuple[_Lent, _Lent]:
    pages, states = kv.get_all_free_pages(), slots.free_slots
    return _Lent(pages.numpy(), range(1, kv.size // page + 1)), _Lent(states.numpy(), range(1, slots.size + 1))


def _lent_jointly(kv: Any) -> tuple[_Lent, _Lent]:
    of_kv, of_states = (
        _Lent(each.free_virtual_ids.numpy(), range(each.min_page_index, each.num_pages))
        for each in (kv.full_attn_allocator, kv.mamba_allocator)
    )
    return of_kv, of_states


def _check_bytes(joint: "JointMemory", kv: Any, num_tokens: int, num_states: int) -> None:
    """In one pool: what is lent and what is free make it up, and SGLang lends all that is free, or none of the gaps."""
    faults = kv.verify_byte_accounting()
    assert not faults, f"the pool's sides are miscounted: {faults}"
    num_free_bytes = joint.num_bytes - joint.bytes_of(num_tokens, num_states)
    assert num_free_bytes == joint.num_free_bytes, f"{joint.num_free_bytes} bytes free, {num_free_bytes} not in use"
    page_bytes = kv.page_size * joint.kv_bytes_per_token
    lendable = kv.available_size() // kv.page_size, kv.mamba_allocator.schedulable_available_size()
    expected = num_free_bytes // page_bytes, num_free_bytes // joint.state_bytes
    is_alike = operator.le if kv.full_attn_allocator.moves_blocked() else operator.eq
    assert all(map(is_alike, lendable, expected)), f"{lendable} pages and slots can be taken, {expected} are free"


def _check_tree(cache: Any, in_flight: Collection[Any]) -> None:
    hybrid = getattr(cache.tree_core, "hybrid", None)
    is_idle = not in_flight and not cache.ongoing_write_through and not cache.ongoing_load_back
    # Stock's own check wants nothing locked.
    if hybrid is not None or is_idle:
        cache.sanity_check()
    if hybrid is not None:
        num_locks = sum(node.num_locks for node in hybrid.tree.nodes())
        num_held = sum(req.lock is not None and not cache.is_root(req.lock.node) for req in in_flight)
        num_copied = len(cache.ongoing_write_through) + len(cache.ongoing_load_back)
        assert num_locks == num_held + num_copied, (
            f"{num_locks} locks on the tree, {num_held} held by requests, {num_copied} by copies"
        )
    if is_idle:
        assert cache.protected_size() == cache.mamba_protected_size() == 0, "something is locked, by nobody"


def _check_checkpoints(cache: Any, slots: Any, held: np.ndarray[Any, Any], in_flight: Collection[Any]) -> None:
    """Of checkpoints in int8: each slot is free, the tree's, or promised to a planned state."""
    promised = np.array([int(slot) for slot in cache.pools.promised], dtype=np.int64)
    parts = {"free": slots.free_slots.numpy(), "tree": held, "promised": promised}
    _check_partition("checkpoint slots", parts, range(1, slots.size + 1))
    runs = [run for req in in_flight if (run := notes_of(req).run) is not None]
    num_planned = sum(len(run.checkpoints) for run in runs)
    assert len(promised) == num_planned, f"{len(promised)} slots promised, for {num_planned} planned states"


def _check_host(cache: Any) -> None:
    """Of the host tier: each row and slot is free or holds a copy, once."""
    pools, rows = cache.host_pool_group, cache.tree_core.rows
    for name, held in ((PoolName.KV, rows.all_kv()), (PoolName.MAMBA, rows.all_states())):
        pool = pools.get_entry(name).host_pool
        parts = {"free": torch.cat([pool.free_slots, *pool.release_slots]).numpy(), "copies": held.numpy()}
        _check_partition(f"{name} on the host", parts, range(pool.logical_size))


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
    kv, run = req.kv, notes_of(req).run
    own = [int(kv.mamba_pool_idx)] if kv.holds_mamba else []
    if kv.mamba_ping_pong_track_buffer is not None:
        held = zip(kv.mamba_ping_pong_track_buffer.tolist(), kv.mamba_ping_pong_empty, strict=True)
        own += [slot for slot, is_empty in held if not is_empty]
    if run is not None:
        own += [int(checkpoint.slot) for checkpoint in run.checkpoints.values()]
    return own


def _check_partition(name: str, parts: dict[str, np.ndarray[Any, Any]], numbers: range) -> None:
    """Each of `numbers` is in one of `parts`, once."""
    counts = np.bincount(np.concatenate(list(parts.values())), minlength=numbers.stop)
    twice = np.flatnonzero(counts > 1)
    if len(twice):
        owners = [part for part, found in parts.items() if twice[0] in found]
        raise AssertionError(f"{name}: {len(twice)} lent twice, first {twice[0]}, to {' and '.join(owners)}")
    lost = np.flatnonzero(counts[numbers.start : numbers.stop] == 0) + numbers.start
    assert not len(lost), f"{name}: {len(lost)} of {len(numbers)} lost, first {lost[0]}"
    assert len(counts) == numbers.stop, f"{name}: one of {len(counts) - 1}, of {numbers.stop - 1}"
    assert not counts[: numbers.start].any(), f"{name}: one below {numbers.start}"
