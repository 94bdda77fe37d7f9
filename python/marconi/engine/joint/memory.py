"""SGLang's one pool for KV and states (`--enable-unified-memory`), counted in bytes.

KV grows down from the top of one buffer and states up from its bottom, each in entries of its own size; what is freed
in between is closed up by moving entries, whose indices are names that stay. So whatever a victim frees serves either
side, and what can be lent is

    free = num_bytes - KV that is lent - states that are lent,      in whole pages, or in whole states.

Entry 0 of the states, and what of the buffer makes no whole page at its top, is never lent.

The old place of an entry that has moved is *pending* while a forward pass may still read it. SGLang does not count it
until it finds that the pass has ended, which each of several ranks finds at its own time: one that counts less would
evict another state. Here pending places count as free, so what can be lent depends on what is lent alone, the same on
every rank; one rank does as many do. An allocation that needs them makes the stream, not the host, wait for the pass.

Where transfers of a prefill server forbid SGLang to move entries, it counts by itself.

Source: `srt/mem_cache/allocator/unified_mamba.py`, `srt/mem_cache/allocator/unified_sub_pool.py`.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.allocator.unified_mamba import UnifiedMambaTokenToKVPoolAllocator


class JointMemory:
    """The one pool of a scheduler, in bytes."""

    def __init__(self, allocator: UnifiedMambaTokenToKVPoolAllocator) -> None:
        """The pool that `allocator` lends from."""
        kv, states = allocator.full_attn_allocator, allocator.mamba_allocator
        self._kv, self._states = kv, states
        self.kv_bytes_per_token: int = kv.entry_bytes
        self.state_bytes: int = states.entry_bytes
        self.num_bytes: int = kv.num_pages * kv.entry_bytes_per_page - states.min_slot_index * states.entry_bytes

    @classmethod
    def of(cls, allocator: Any) -> "JointMemory | None":
        """That behind the KV allocator of a server; None if KV and states have pools of their own."""
        return cls(allocator) if isinstance(allocator, UnifiedMambaTokenToKVPoolAllocator) else None

    @property
    def num_free_bytes(self) -> int:
        """Bytes that are not lent."""
        return self.num_bytes - self.bytes_of(self._kv.allocated_count(), self._states.allocated_count())

    def bytes_of(self, num_tokens: int, num_states: int) -> int:
        """Bytes of so many tokens and states."""
        return num_tokens * self.kv_bytes_per_token + num_states * self.state_bytes


def around_schedulable_available_size(count: Callable[[Any], int], side: Any) -> int:
    """Around `MultiEndedAllocator.schedulable_available_size`: tokens, or states, of `side` with those pending."""
    peer = side._growth_side_neighbor()
    if peer is None or _may_not_move(side) or _may_not_move(peer):
        return count(side)
    num_peer = len(peer._free_phys_pages) + len(peer._pending_reuse_pages_cpu)
    num_available: int = side._available_tokens(num_peer * peer.entry_bytes_per_page)
    return num_available + len(side._pending_reuse_pages_cpu) * side.page_size


def around_flush_for_allocation(flush: Callable[[Any], int], peer: Any) -> int:
    """Around `MultiEndedAllocator.flush_for_allocation`: the side that is short takes its own pending places, too."""
    num_moved = flush(peer)
    side = peer._growth_side_neighbor()
    if side is not None:
        side._drain_pending_reuse(urgent=True)
    return num_moved


def _may_not_move(side: Any) -> bool:
    return side.disagg_move_gate is not None or side.host_transfer_move_gate is not None
