"""Which requests SGLang's scheduler admits to one pool for KV and states (`--enable-unified-memory`), under our cache.

SGLang counts on the free bytes and on evictable KV, in tokens, and takes one state slot for each request. Both are
short of what happens: evictable states give bytes to KV as well, so a pool full of states would admit nothing, ever;
and a request that tracks its states takes their slots too, so a full pool would admit what it cannot serve, and the
scheduler would end. Here instead:

    budget = (free + evictable) bytes,      a request takes its KV, its working slot and its tracking slots.

Nothing changes for another cache. Source: `srt/managers/schedule_policy.py`, `srt/mem_cache/prefill_budget.py`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from marconi.engine.joint.cache import JointRadixCache

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class JointPrefillBudget(PrefillBudget):
    """KV tokens that requests can be given."""

    tree_cache: JointRadixCache

    def _available_and_evictable(self) -> int:
        page_bytes = self.page_size * self.tree_cache.joint_memory.kv_bytes_per_token
        return lendable_bytes(self.tree_cache) // page_bytes * self.page_size


def lendable_bytes(cache: JointRadixCache) -> int:
    """Bytes that requests can be given once everything evictable has been evicted."""
    return cache.num_lendable_bytes + cache.evictable_bytes


def around_create_prefill_budget(
    create: Callable[..., Any], allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
) -> Any:
    """Around `BaseTokenToKVPoolAllocator.create_prefill_budget`: the budget of an admission."""
    if not isinstance(tree_cache, JointRadixCache):
        return create(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)
    return JointPrefillBudget(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)


def on_init_adder(_result: None, adder: Any, *_: Any, **__: Any) -> None:
    """After `PrefillAdder.__init__`: the slots that requests can be given."""
    cache = adder.tree_cache
    if isinstance(cache, JointRadixCache):
        adder.rem_mamba_slots = lendable_bytes(cache) // cache.joint_memory.state_bytes


def around_gap_budget(budget: Callable[..., int], adder: Any, req: "Req", **kwargs: Any) -> int:
    """Around `PrefillAdder._mamba_gap_budget_for_req`: KV tokens in whose place a request takes slots."""
    reserve = budget(adder, req, **kwargs)
    if not isinstance(adder.tree_cache, JointRadixCache) or req.kv.mamba_ping_pong_track_buffer is not None:
        return reserve
    num_tracking: int = adder.tree_cache.req_to_token_pool.mamba_initial_tracking_slots
    cost: int = adder._mamba_slot_cost
    return reserve + num_tracking * cost
