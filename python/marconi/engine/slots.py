"""Slots for the states that a prefill is planned to leave.

A planned state may take what is free or what is worth less, but nothing that a request needs to run: what is *reserved*
is what requests take before the states of this prefill join the tree, and a slot is taken only beside it. One on
probation takes a free slot or that of an older one on probation.
"""

from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from marconi.engine.reclaim import ReclaimingCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class SlotTakingCache(ReclaimingCache):
    """A cache that takes slots ahead of a prefill."""

    def _reserved(self, reqs: "list[Req]") -> int:
        """Slots that are taken before the states of this prefill join the tree.

        By SGLang for `reqs` (`mem_cache/allocation.py:ensure_mamba_capacity`), and by the requests which may still
        start: each its working slot, its tracking slots, and the state that it starts from, which it locks.
        """
        pool = self.req_to_token_pool
        num_tracking = pool.mamba_initial_tracking_slots
        num_needed, num_others = 0, pool.available_size()
        for req in reqs:
            kv = req.kv
            num_needed += (not kv.holds_mamba) + (num_tracking if kv.mamba_ping_pong_track_buffer is None else 0)
            num_others -= kv.req_pool_idx is None
        return num_needed + max(num_others, 0) * (2 + num_tracking)

    def _spares_slot(self, reserved: int, on_probation: bool) -> bool:
        """Whether a slot is left beside what is `reserved`, once everything has gone that may go for it."""
        core = self.tree_core
        tiers = core.served.tiers
        num_evictable = tiers.num_on_probation if on_probation else core.mamba_evictable_size() - tiers.num_awaited
        return bool(self.req_to_token_pool.mamba_allocator.available_size() + num_evictable > reserved)

    def _take_slot(self, reserved: int, on_probation: bool, now_s: float) -> torch.Tensor | None:
        """A slot for a planned state; None if it would be another's that is worth more, or a request's."""
        allocator = self.req_to_token_pool.mamba_allocator
        served = self.tree_core.served
        if not self._spares_slot(reserved, on_probation):
            return None
        slot: torch.Tensor | None = allocator.alloc(1)
        if slot is not None:
            return slot
        if not on_probation:
            self.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=1))
        else:
            freed = served.evict_on_probation(self.tree_core.needs[ComponentType.MAMBA], now_s)
            if freed is None:
                return None
            self._apply_eviction_result(self.tree_core.drain(freed))
        taken: torch.Tensor | None = allocator.alloc(1)
        return taken

    def _free_slots(self, slots: dict[int, torch.Tensor]) -> None:
        for slot in slots.values():
            self.req_to_token_pool.mamba_allocator.free(slot)
