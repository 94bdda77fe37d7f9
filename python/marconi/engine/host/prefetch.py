"""States that an orchestrator asks for ahead (`prefetch` of `kv_hints`), from the host to the device.

A request that ends names a prompt that will come. If the host holds a deeper state for it than the device, and loading
that saves time, the load begins at once, by SGLang's own controller, while nobody waits for it. What is loaded joins
the tree and is locked until it has arrived; a forward pass that begins before waits for it, layer by layer.

    room     what is free, or freed by evicting states of the same name space that are not retained; no others
    share    beside what is loaded, half of either pool stays free or evictable for requests that run
    at once  the prefetches of one request; those of the next are rejected until they have arrived

The last bound is one of SGLang's as well: of its three counters of layers (`LayerDoneCounter`) two may belong to
batches in flight, so a prefetch takes the third, and none other until its load is there.

Owner: the scheduler's thread; all ranks load the same.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from marconi.engine.cache.pools import DevicePools
from marconi.engine.host.core import TieredTreeCore
from marconi.policy.base import Need
from marconi.policy.kv_hints import Prefetch
from marconi.policy.request import Request
from marconi.policy.retention import root_of
from marconi.tree import Match, Node

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

MAX_EVICTIONS: Final = 64
"""States of its name space that are evicted for one prefetch."""
UNDER_WAY: Final = "the prefetches of an earlier request are still loading"


class Loading(Protocol):
    """The cache that loads (`host/cache.py`)."""

    tree_core: TieredTreeCore
    ongoing_load_back: dict[int, Any]
    cache_controller: Any
    req_to_token_pool: Any
    pools: DevicePools

    def load_into_tree(
        self, req: "Req", request: Request, hosted: Node, from_depth: int, slot: torch.Tensor | None
    ) -> int:
        """Ask for the KV of `hosted` beyond `from_depth` and its state, in `slot`; returns the load's id."""
        ...

    def let_lend(self, num_tokens: int, num_states: int) -> None:
        """Wait until `num_tokens` and `num_states`, which are free, can be lent."""
        ...

    def evict_own(self, root: Node, need: Need) -> bool:
        """Evict a state of the name space of `root` that is not retained; False if it has none to evict."""
        ...


class Prefetches:
    """The loads of one cache that no request waits for."""

    def __init__(self, cache: Loading) -> None:
        self._cache = cache
        self._load_ids: list[int] = []
        """The loads of the last request that asked for any."""
        self._producer = -1
        """SGLang's counter of the layers that have arrived."""

    def under_way(self) -> int:
        """The counter of the loads that have not arrived; -1 if there are none."""
        loading = self._cache.ongoing_load_back
        if not any(load_id in loading for load_id in self._load_ids):
            self._load_ids, self._producer = [], -1
        return self._producer

    @contextmanager
    def of(self, req: "Req") -> Iterator[Prefetch]:
        """How `req` loads states for prompts of its own name space; all loads begin at the end of the context."""
        is_busy = self.under_way() >= 0

        def prefetch(input_ids: Sequence[int]) -> Node:
            if is_busy:
                raise ValueError(UNDER_WAY)
            return self._load(req, input_ids)

        yield prefetch
        if not is_busy and self._load_ids:
            self._producer = int(self._cache.cache_controller.start_loading())

    def _load(self, req: "Req", input_ids: Sequence[int]) -> Node:
        cache, core = self._cache, self._cache.tree_core
        tier = core.tier
        assert tier is not None, "no host tier"
        request = core.request_of(array("q", input_ids), req.extra_key, req.cache_salt)
        match = core.hybrid.match(request)
        if not tier.to_load(request, match):
            raise ValueError(_why_not(match))
        hosted = match.hosted
        assert hosted is not None
        assert hosted.host_copy is not None
        # Victims are copied to the host, where this copy is not to give way.
        tier.lock(hosted.host_copy)
        try:
            match = self._make_room(request, hosted)
        finally:
            tier.unlock(hosted.host_copy)
        slot = cache.req_to_token_pool.mamba_allocator.alloc(1)
        from_depth = min(match.num_live_tokens, hosted.depth)
        self._load_ids.append(cache.load_into_tree(req, request, hosted, from_depth, slot))
        return hosted

    def _make_room(self, request: Request, hosted: Node) -> Match:
        """Evict states of the name space until `hosted` fits, and return what is left of its path on the device.

        `ValueError` where the name space has too little to evict, or requests that run need the memory.
        """
        core, root = self._cache.tree_core, root_of(hosted)
        match = core.hybrid.tree.match(request.path, hosted.depth, request.namespace)
        wanted = self._wanted(match, hosted)
        pools = self._cache.pools
        evictable = pools.amounts(core.full_evictable_size(), core.mamba_evictable_size())
        num_free = pools.num_free
        for need, size in pools.sizes.items():
            if 2 * (num_free[need] + evictable[need] - wanted[need]) < size:
                raise ValueError("requests that run need the memory")
        # In the tree and in memory: a copy of the state that ends while victims are copied gives both locks back.
        start = core.handle(match.checkpoint)
        held = core.inc_lock_ref(start)
        try:
            for _ in range(MAX_EVICTIONS + 1):
                short = next((need for need, num in pools.num_free.items() if num < wanted[need]), None)
                if short is None:
                    self._cache.let_lend(_num_missing_tokens(match, hosted), 1)
                    return match
                if not self._cache.evict_own(root, short):
                    break
                match = core.hybrid.tree.match(request.path, hosted.depth, request.namespace)
                wanted = self._wanted(match, hosted)
        finally:
            core.dec_lock_ref(start, held.to_dec_params())
        raise ValueError("no room: other states of its name space are too few, retained, in use or being copied")

    def _wanted(self, match: Match, hosted: Node) -> Mapping[Need, int]:
        """The part of the device's pools that loading `hosted` takes."""
        return self._cache.pools.amounts(_num_missing_tokens(match, hosted), 1)


def _num_missing_tokens(match: Match, hosted: Node) -> int:
    """Tokens of the path of `hosted` that the device lacks."""
    return hosted.depth - min(match.num_live_tokens, hosted.depth)


def _why_not(match: Match) -> str:
    """Why nothing is loaded for a prompt."""
    hosted, depth = match.hosted, match.checkpoint.depth
    if hosted is None or hosted.depth <= depth:
        return f"the host holds no state for it beyond the {depth} tokens that the device holds"
    return f"loading the state at {hosted.depth} tokens takes longer than computing from {depth}"
