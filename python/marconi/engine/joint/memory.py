"""SGLang's one pool for KV and states (`--enable-unified-memory`), counted in bytes.

KV grows down from the top of one buffer and states up from its bottom, each in entries of its own size; what is freed
in between is closed up by moving entries, whose indices are names that stay. So whatever a victim frees serves either
side, and what can be lent is

    free = num_bytes - KV that is lent - states that are lent,      in whole pages, or in whole states.

Entry 0 of the states, and what of the buffer makes no whole page at its top, is never lent. Until a forward pass that
reads an entry's old place has ended, SGLang lends a little less.

Source: `srt/mem_cache/allocator/unified_mamba.py`, `srt/mem_cache/allocator/unified_sub_pool.py`.
"""

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
