"""SGLang's counts of one pool for KV and states (`--enable-unified-memory`) and its admission, under our cache.

SGLang counts on the free bytes and on evictable KV, in tokens, and takes one state slot for each request. Both are
short of what happens: evictable states give bytes to KV as well, so a pool full of states would admit nothing, ever;
and a request that tracks its states takes their slots too, so a full pool would admit what it cannot serve, and the
scheduler would end. Here instead:

    budget = (free + evictable) bytes,      a request takes its KV, its working slot and its tracking slots.

Places that are pending count as free on every rank (`pools.py`). Nothing changes for another cache.

Sources: `srt/managers/schedule_policy.py`, `srt/mem_cache/prefill_budget.py`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from marconi.engine.joint.pools import JointPools

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class JointPrefillBudget(PrefillBudget):
    """KV tokens that requests can be given."""

    def _available_and_evictable(self) -> int:
        pools = _joint(self.tree_cache)
        assert pools is not None, "the cache of one pool"
        page_bytes = self.page_size * pools.memory.kv_bytes_per_token
        return pools.obtainable_bytes(self.tree_cache.tree_core) // page_bytes * self.page_size


def _joint(tree_cache: Any) -> JointPools | None:
    """The one pool of a cache of ours; None of any other."""
    pools = getattr(tree_cache, "pools", None)
    return pools if isinstance(pools, JointPools) else None


def around_create_prefill_budget(
    create: Callable[..., Any], allocator: Any, tree_cache: Any, *, num_mixed_decode_tokens: int = 0
) -> Any:
    """Around `BaseTokenToKVPoolAllocator.create_prefill_budget`: the budget of an admission."""
    kind = create if _joint(tree_cache) is None else JointPrefillBudget
    return kind(allocator, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)


def on_init_adder(_result: None, adder: Any, *_: Any, **__: Any) -> None:
    """After `PrefillAdder.__init__`: the slots that requests can be given."""
    pools = _joint(adder.tree_cache)
    if pools is not None:
        adder.rem_mamba_slots = pools.obtainable_bytes(adder.tree_cache.tree_core) // pools.memory.state_bytes


def around_gap_budget(budget: Callable[..., int], adder: Any, req: "Req", **kwargs: Any) -> int:
    """Around `PrefillAdder._mamba_gap_budget_for_req`: KV tokens in whose place a request takes slots."""
    reserve = budget(adder, req, **kwargs)
    if _joint(adder.tree_cache) is None or req.kv.mamba_ping_pong_track_buffer is not None:
        return reserve
    num_tracking: int = adder.tree_cache.req_to_token_pool.mamba_initial_tracking_slots
    cost: int = adder._mamba_slot_cost
    return reserve + num_tracking * cost


def around_schedulable_available_size(count: Callable[[Any], int], side: Any) -> int:
    """Around `MultiEndedAllocator.schedulable_available_size`: tokens, or states, of `side` with those pending."""
    peer = side._growth_side_neighbor()
    if peer is None:
        return count(side)
    for each in (side, peer):
        if each.disagg_move_gate is not None or (each.host_transfer_move_gate is not None and each.moves_blocked()):
            return count(side)
    num_peer = len(peer._free_phys_pages) + len(peer._pending_reuse_pages_cpu)
    num_available: int = side._available_tokens(num_peer * peer.entry_bytes_per_page)
    return num_available + len(side._pending_reuse_pages_cpu) * side.page_size


def around_flush(flush: Callable[..., int], side: Any, *, urgent: bool) -> int:
    """Around `MultiEndedAllocator._flush`: where transfers may forbid moves, close all gaps of `side` or none.

    How many gaps are left decides there how much can be lent, and SGLang closes those alone that no pass reads any
    more, as far as a rank knows. An urgent flush makes the stream wait for the pass. Ranks flush between the same two
    steps, and see a transfer end at the same one (`poll_and_all_reduce`).
    """
    is_gated = side.disagg_move_gate is not None or side.host_transfer_move_gate is not None
    return flush(side, urgent=urgent or is_gated)


def around_flush_for_allocation(flush: Callable[[Any], int], peer: Any) -> int:
    """Around `MultiEndedAllocator.flush_for_allocation`: the side that is short takes its own pending places, too."""
    num_moved = flush(peer)
    side = peer._growth_side_neighbor()
    if side is not None:
        side._drain_pending_reuse(urgent=True)
    return num_moved
