"""The cache of a hybrid model with a host tier (`--enable-hierarchical-cache`).

    copies     between two steps of the scheduler the next victims are chosen ahead and copied to the host, by SGLang's
               own controller and transfer engine (`policy/write_behind.py`); an eviction that runs past what was chosen
               copies at once what is worth more than the wait, and waits for the copies under way where nothing else
               may be evicted: memory that a request was admitted for has to be there
    match      promises what the host holds beyond the device's state, if loading it saves time
    load       when the request is admitted: its KV joins the tree, its state is loaded to a slot of the tree's and the
               request's own, layer by layer, as the forward needs them
    prefetch   for a hint of a request that ends, a state is loaded that another one will start from (`prefetch.py`)

A state that is on its way to the device is one to start from: before it is copied for another request, SGLang waits
until the last layer has arrived (`HybridReqToTokenPool.copy_mamba_state`).

Source of what it extends: `srt/mem_cache/unified_radix_cache.py`. Owner: the scheduler's thread.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase
from sglang.srt.mem_cache.unified_radix_cache import _OngoingLoadBack

from marconi.engine.cache.pools import Targets
from marconi.engine.cache.radix_cache import MarconiRadixCache
from marconi.engine.cache.scheduler import WaitingRequests, note_match, notes_of
from marconi.engine.cache.tree_core import IDS_PER_TOKEN
from marconi.engine.host.core import TieredTreeCore
from marconi.engine.host.link import LinkSpeed, link_speed
from marconi.engine.host.prefetch import Prefetches
from marconi.engine.host.rows import HostRows
from marconi.engine.launch.policies import HostTierConfig, hybrid_cache
from marconi.engine.reports.status import HostUse, Use
from marconi.engine.version import Refusal
from marconi.events.tree_log import Tenant
from marconi.policy.base import Need
from marconi.policy.host_tier import HostMemory
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.kv_hints import Prefetch
from marconi.policy.request import Lease, Request
from marconi.policy.write_behind import MARGIN
from marconi.tree import Match, Node
from marconi.tree.memory import Memory

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)

DEMAND_DECAY: Final = 0.99
"""Factor of the demand, the most that a step has lately evicted, at each step."""
MIN_STATES_AHEAD: Final = 4
"""States that are there for the next step at least, however few slots there are."""


@dataclass(slots=True)
class _Ahead:
    """How many tokens or states are free, or as good as free, between two steps: what a step has lately evicted."""

    least: float
    most: float
    num_evicted: int = 0
    """In this step."""
    demand: float = 0.0

    def next_step(self) -> int:
        self.demand = max(DEMAND_DECAY * self.demand, self.num_evicted)
        self.num_evicted = 0
        return math.ceil(min(max(self.demand, self.least), self.most))


def require_copies(pool: Any, io_backend: str) -> None:
    """Raise `Refusal` unless SGLang can copy to the host pool `pool` from rows that lie apart, as those of one pool do.

    SGLang itself raises at the first copy.
    """
    if io_backend == "kernel" and not pool.device_rows_packed and not pool.can_use_jit:
        raise Refusal(
            "--enable-hierarchical-cache in one pool: SGLang has no kernel that copies KV of "
            f"{pool.size_per_token:,} bytes a token; give --mamba-full-memory-ratio 0.9, for two pools"
        )


class TieredRadixCache(MarconiRadixCache):
    """KV and states on the device and on the host."""

    tree_core: TieredTreeCore
    link: LinkSpeed | None = None
    """The speed of the link to the host's memory; measured at the start unless set."""
    _below: HostTierConfig | None = None
    _waited_s = 0.0
    """How long the eviction under way has waited for copies."""

    def make_tree_core(self, params: "CacheInitParams") -> TieredTreeCore:
        """The core of this cache, without a host tier until there are host pools."""
        page = params.page_size

        def make(memory: Memory) -> HybridCache:
            choice, ids, explains = self.choice, page * IDS_PER_TOKEN, self.flags.explain
            below, needs = self._below, frozenset(self.pools.needs.values())
            return hybrid_cache(choice, self.costs, page, ids, memory, self.latency, needs, below, explains=explains)

        return TieredTreeCore(params, make, self.clock, self.pools.needs, self.log)

    def reset(self) -> None:
        """Clear both tiers, once the transfers in flight have ended."""
        if self.cache_controller is not None:
            for ack in (*self.cache_controller.ack_write_queue, *self.cache_controller.ack_load_queue):
                ack.finish_event.synchronize()
        super().reset()
        self.prefetches = Prefetches(self)

    def init_hicache(self, server_args: Any, params: "CacheInitParams") -> None:
        """Make SGLang's host pools, and keep copies there from now on."""
        super().init_hicache(server_args, params)
        pools = self.host_pool_group
        require_copies(pools.get_pool(PoolName.KV), self.cache_controller.io_backend)
        rows = self.tree_core.rows = HostRows(pools)
        num_tokens, num_slots = (pools.get_pool(name).available_size() for name in (PoolName.KV, PoolName.MAMBA))
        memory = HostMemory(num_tokens, num_slots)
        self._below = HostTierConfig(memory, self._slowest_link(), self._prefill_s, rows, self._copy_now)
        self._load_ids = count(-1, -1)
        least = self.pools.amounts(max(params.chunked_prefill_size or 0, 0), MIN_STATES_AHEAD)
        self._ahead = {
            need: _Ahead(max(MARGIN * size, min(least[need], size / 4)), size / 2)
            for need, size in self.pools.sizes.items()
        }
        self.tree_core.reset()
        self.waiting = WaitingRequests(self.tree_core, self.moments)

    def _slowest_link(self) -> LinkSpeed:
        """The slowest rank's speed each way, so that all ranks use the same numbers."""
        slowest = torch.tensor(self.link or link_speed(str(self.device)), dtype=torch.float64)
        self._all_reduce(slowest, torch.distributed.ReduceOp.MIN)
        link = LinkSpeed(*slowest.tolist())
        logger.info(
            "marconi: the host's memory is read with %.3g GB/s and written with %.3g GB/s",
            link.load / 1e9,
            link.copy / 1e9,
        )
        return link

    def attach_storage_backend(self, storage_backend: str, *_: Any, **__: Any) -> tuple[bool, str]:
        """Refuse a store behind the host (`PUT /hicache/storage-backend`) that was not given at the start."""
        return (
            False,
            f"a store must be given at the start, as --hicache-storage-backend file, got {storage_backend}",
        )

    def settle(self) -> None:
        """Wait until what is on its way between the tiers has arrived."""
        self.writing_check(write_back=True)
        self.loading_check(finish_count=len(self.cache_controller.ack_load_queue))

    def _prefill_s(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        """Learned prefill time; until one is known assume 1 s per token, which favours keeping."""
        if not self.latency.is_known:
            return float(num_prompt_tokens - num_cached_tokens)
        return self.latency.seconds(num_cached_tokens, num_prompt_tokens)

    @property
    def host_use(self) -> HostUse | None:
        """The host tier."""
        core, rows = self.tree_core, self.tree_core.rows
        tier, counters = core.tier, core.hybrid.counters
        if tier is None or rows is None or self._below is None:
            return None
        size, held = self._below.memory, tier.copies
        num_kept = len(tier.being_copied)
        return HostUse(
            Use(size.num_tokens, size.num_tokens - held.num_tokens, held.num_tokens),
            Use(size.num_slots, size.num_slots - held.num_states, held.num_states - num_kept),
            rows.num_copied,
            rows.num_dropped,
            counters.num_loads,
            counters.num_loaded_tokens,
            self.stats.num_evictions,
            self.stats.num_waits,
            round(self.stats.waited_s, 6),
        )

    # Copies

    def check_hicache_events(self) -> None:
        """Take note of what was copied and loaded, and copy what is evicted next."""
        super().check_hicache_events()
        core, tier = self.tree_core, self.tree_core.tier
        assert tier is not None
        num_free = self.pools.num_free
        num_missing = {need: ahead.next_step() - num_free[need] for need, ahead in self._ahead.items()}
        for node in tier.choose(core.hybrid, num_missing, self.clock()):
            self._begin_copy(node)
        self.flush_pending_backups()

    def _copy_now(self, node: Node) -> None:
        """Fill the copy of a victim that was not chosen ahead."""
        tier = self.tree_core.tier
        assert tier is not None
        if self._begin_copy(node):
            self._wait_for_copies()

    def _wait_for_copies(self) -> None:
        start_s = time.perf_counter()
        self.writing_check(write_back=True)
        self._waited_s += time.perf_counter() - start_s

    def let_lend(self, num_tokens: int, num_states: int) -> None:
        """Wait until `num_tokens` and `num_states`, which are free, can be lent; the wait counts as an eviction's."""
        if not self.pools.can_lend(num_tokens, num_states):
            self._waited_s = 0.0
            self._let_arrive()
            self.stats.evicted(self._waited_s)

    def _let_arrive(self) -> None:
        """Wait for copies; of one pool for loads, too, those asked for included: each forbids its entries to move."""
        self._wait_for_copies()
        if self.pools.awaits_copies:
            start_s = time.perf_counter()
            self.settle()
            if self.cache_controller.start_loading() >= 0:
                self.settle()
            self._waited_s += time.perf_counter() - start_s

    def _begin_copy(self, node: Node) -> bool:
        tier = self.tree_core.tier
        assert tier is not None
        self._execute_and_commit_kv_backup(BackupKV(node_ids=[self.tree_core.handle(node)]))
        if node not in tier.being_copied:
            tier.abandon(node)
        return node in tier.being_copied

    def _evict(
        self,
        params: EvictParams,
        available_size_targets: Targets | None = None,
        *,
        allocation_reclaim_satisfied: Callable[[], bool] | None = None,
    ) -> EvictResult:
        assert allocation_reclaim_satisfied is None, "a quota of KV and states apart"
        self._waited_s = 0.0
        result = self._evict_or_wait(params, available_size_targets or {})
        if result.num_tokens_evicted or result.mamba_num_evicted:
            self.stats.evicted(self._waited_s)
        return result

    def _evict_or_wait(self, params: EvictParams, targets: Targets) -> EvictResult:
        """Evict, and once more after waiting for what is on its way if that freed too little."""
        result = super()._evict(params, targets)
        num_tokens, num_states = result.num_tokens_evicted, result.mamba_num_evicted
        for need, num_evicted in self.pools.amounts(num_tokens, num_states).items():
            self._ahead[need].num_evicted += num_evicted
        is_under_way = self.ongoing_write_through or self.pools.awaits_copies
        if not is_under_way or not self._is_short(params, result, targets):
            return result
        self._let_arrive()
        left = EvictParams(
            num_tokens=max(params.num_tokens - num_tokens, 0), mamba_num=max(params.mamba_num - num_states, 0)
        )
        more = super()._evict(left, targets)
        return EvictResult(
            num_tokens_evicted=num_tokens + more.num_tokens_evicted,
            mamba_num_evicted=num_states + more.mamba_num_evicted,
        )

    def evict_own(self, root: Node, need: Need) -> bool:
        """Evict a state of the name space of `root` that is not retained; False if it has none to evict."""
        self._waited_s = 0.0
        freed = self.tree_core.hybrid.evict_own(root, need, self.clock())
        self.pools.give_back(self.tree_core)
        if freed is None:
            return False
        self.stats.evicted(self._waited_s)
        return True

    def _is_short(self, params: EvictParams, result: EvictResult, targets: Targets) -> bool:
        """True if an eviction freed less than it was asked for."""
        if targets:
            return any(self._component_available_size(component) < size for component, size in targets.values())
        return bool(result.num_tokens_evicted < params.num_tokens or result.mamba_num_evicted < params.mamba_num)

    # Matching

    def _match_tree(self, params: MatchPrefixParams) -> MatchResult:
        """Match on the device, and promise what the host has beyond it, if loading it saves time."""
        result = super()._match_tree(params)
        tier = self.tree_core.tier
        if params.req is None or tier is None or envs.SGLANG_RADIX_FORCE_MISS.get():
            return result
        lease = notes_of(params.req).lease
        assert lease is not None, "a match leaves a note"
        request, match = lease
        depth = tier.to_load(request, match)
        hosted = match.hosted
        if not depth or hosted is None:
            return result
        return result._replace(
            best_match_node=self.tree_core.handle(hosted),
            host_hit_length=depth - result.device_prefix_len,
            mamba_host_hit_length=1,
        )

    # Loads

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, int]:
        """Load what was promised to a request: tokens that are cached beyond its hit now, and the node at their end.

        Nothing is loaded where there is no room for it; the request then starts from its hit on the device.
        """
        req = params.req
        assert req is not None
        hosted = self.tree_core.node_by_id(params.best_match_node)
        lease = notes_of(req).lease
        assert lease is not None, "a load was promised by a match"
        if not hosted.has_copy or hosted.depth != req.prefix_len + params.host_hit_length:
            return 0, req.last_node
        match = self._make_room(lease.request, hosted, (not req.kv.holds_mamba) + (not hosted.has_state))
        if match is None:
            return 0, req.last_node
        self._load(req, lease.request, hosted, min(match.num_live_tokens, hosted.depth))
        return params.host_hit_length, self.tree_core.handle(hosted)

    def _make_room(self, request: Request, hosted: Node, num_slots: int) -> Match | None:
        """Evict until what the device lacks of the path of `hosted` and `num_slots` states fit; None if they cannot."""
        tree = self.tree_core.hybrid.tree
        while True:
            match = tree.match(request.path, hosted.depth, request.namespace)
            num_tokens = hosted.depth - min(match.num_live_tokens, hosted.depth)
            room = self.pools.room_for(num_tokens, num_slots)
            if room is None:
                self.let_lend(num_tokens, num_slots)
                return match
            result = self._evict(*room)
            if not result.num_tokens_evicted and not result.mamba_num_evicted:
                return None

    def _load(self, req: "Req", request: Request, hosted: Node, from_depth: int) -> None:
        """Load the KV of `hosted` beyond `from_depth`, which the device has, and its state, for which there is room."""
        allocator = self.req_to_token_pool.mamba_allocator
        if not req.kv.holds_mamba:
            req.kv.mamba_pool_idx = allocator.alloc(1)[0]
        slot: torch.Tensor | None = None if hosted.has_state else allocator.alloc(1)
        self.load_into_tree(req, request, hosted, from_depth, slot, [req.kv.mamba_pool_idx.view(1)])
        req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
        notes_of(req).has_loaded = True
        self._go_on_from(req, request, hosted)

    def load_into_tree(
        self,
        req: "Req",
        request: Request,
        hosted: Node,
        from_depth: int,
        slot: torch.Tensor | None,
        copies: Sequence[torch.Tensor] = (),
    ) -> int:
        """Load the KV of `hosted` beyond `from_depth`, and its state to the slot of the tree's and to `copies`.

        `slot` is None where the tree has the state. The load is locked until it has arrived, and begins with the next
        call of `ready_to_load_host_cache`. Returns its id. `request` is of the name space of `req`.
        """
        core, rows = self.tree_core, self.tree_core.rows
        assert rows is not None
        targets = [*copies, *([] if slot is None else [slot])]
        states = [
            PoolTransfer(name=PoolName.MAMBA, host_indices=rows.states[hosted], device_indices=target)
            for target in targets
        ]
        kv = PoolTransfer(name=PoolName.KV, host_indices=rows.path_rows(hosted, from_depth))
        sidecars = self._build_sidecar_transfers(CacheTransferPhase.LOAD_BACK, kv, {ComponentType.MAMBA: states})
        load_id = next(self._load_ids)
        indices = self.cache_controller.load(
            host_indices=kv.host_indices, node_id=load_id, extra_pools=[*states, *sidecars]
        )
        assert indices is not None, "no memory, where room was made for it"
        tenant = Tenant(req.extra_key, req.cache_salt)
        core.insert(indices, from_depth, tenant, lambda: core.hybrid.load(request, hosted.depth, len(indices)))
        if slot is not None:
            core.memory.keep_state(hosted, slot)
            if hosted in rows.ends:
                core.memory.ends.add(hosted)
        handle = core.handle(hosted)
        self.ongoing_load_back[load_id] = _OngoingLoadBack(
            handle, self.inc_lock_ref(handle).to_dec_params(), self.inc_host_lock_ref(handle).to_dec_params()
        )
        return int(load_id)

    def prefetching(self, req: "Req") -> AbstractContextManager[Prefetch | None]:
        """How a hint of `req` loads another prompt's state; what it asks for begins at the end of the context."""
        return nullcontext() if self.tree_core.tier is None else self.prefetches.of(req)

    def ready_to_load_host_cache(self) -> int:
        """Begin what was asked for, and say which load the next forward pass waits for, layer by layer; -1 for none."""
        started = int(super().ready_to_load_host_cache())
        # Loads arrive in their order, so what is begun now arrives after what was prefetched.
        return started if started >= 0 else self.prefetches.under_way()

    def _go_on_from(self, req: "Req", request: Request, node: Node) -> None:
        """`req` starts from `node`, which it has loaded."""
        tree = self.tree_core.hybrid.tree
        for max_tokens in (request.num_prompt_tokens - 1, node.depth):
            match = tree.match(request.path, max_tokens, request.namespace)
            if match.checkpoint is node:
                break
        lease = Lease(request, match)
        note_match(req, lease)
        self.waiting.matched(req, lease)
