"""SGLang's pools of a hybrid model, as the cache takes memory from them: KV and states each in a pool of their own.

    slots     whether a hit or a planned state may take one, and which become the tree's
    victims   evicted until what SGLang lacks is free

One pool (`joint/pools.py`) and checkpoints in int8 (`int8/pools.py`) do some of it otherwise.

Owner: the cache, on the scheduler's thread.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import length_hint
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from marconi.engine.cache.tree_core import NEEDS, MarconiTreeCore
from marconi.engine.reports.status import Use
from marconi.lifecycle.pools import Amount
from marconi.lifecycle.running import Missing, Rows, reserved
from marconi.policy.base import Need
from marconi.tree import Freed, Node

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

Targets: TypeAlias = Mapping[ComponentType, tuple[Any, int]]
"""Per component that is short: the component whose pool is asked, and the free size that is required of it."""


class DevicePools:
    """Two pools. A slot is a tensor of one index."""

    needs: Mapping[ComponentType, Need] = NEEDS
    """The need of a victim when a component is short."""
    are_slots_shared = True
    """Whether the tree keeps a state in the slot in which a request left it."""

    def __init__(self, requests: Any, kv: Any) -> None:
        """`requests` is SGLang's pool of requests, which has the state slots, and `kv` its allocator of KV."""
        self.req_to_token_pool = requests
        self.token_to_kv_pool_allocator = kv

    def reset(self) -> None:
        """SGLang has cleared the pools."""

    @property
    def state_slots(self) -> Any:
        """SGLang's allocator of the slots that hold the tree's states."""
        return self.req_to_token_pool.mamba_allocator

    @property
    def state_need(self) -> Need:
        """The need of a victim when a planned state lacks a slot."""
        return self.needs[ComponentType.MAMBA]

    def joint_use(self, core: MarconiTreeCore) -> Use | None:
        """Bytes of the one pool; None where KV and states have pools of their own."""
        return None

    # What is there

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the pool of KV holds."""
        return int(self.token_to_kv_pool_allocator.size)

    @property
    def num_free_kv_tokens(self) -> int:
        """Tokens of it that are not lent."""
        return int(self.token_to_kv_pool_allocator.available_size())

    @property
    def sizes(self) -> Mapping[Need, int]:
        """All that can be lent, by what a victim is evicted for."""
        return self.amounts(self.num_kv_tokens, self.req_to_token_pool.mamba_allocator.size)

    @property
    def num_free(self) -> Mapping[Need, int]:
        """The part of it that is not lent."""
        slots = self.req_to_token_pool.mamba_allocator
        return self.amounts(self.num_free_kv_tokens, slots.schedulable_available_size())

    def amounts(self, num_tokens: int, num_states: int) -> Mapping[Need, int]:
        """The amount of each that `num_tokens` and `num_states` take."""
        return {Need.KV: num_tokens, Need.STATE: num_states}

    def room_for(self, num_tokens: int, num_states: int) -> tuple[EvictParams, Targets] | None:
        """An eviction in SGLang's words after which `num_tokens` and `num_states` are free; None if they are now."""
        wanted = {ComponentType.FULL: num_tokens, ComponentType.MAMBA: num_states}
        num_free = self.num_free
        free = {ComponentType.FULL: num_free[Need.KV], ComponentType.MAMBA: num_free[Need.STATE]}
        short = {kind: num - free[kind] for kind, num in wanted.items() if num > free[kind]}
        if not short:
            return None
        params = EvictParams(num_tokens=short.get(ComponentType.FULL, 0), mamba_num=short.get(ComponentType.MAMBA, 0))
        return params, {kind: (kind, wanted[kind]) for kind in short}

    @property
    def awaits_copies(self) -> bool:
        """True if some of what is free cannot be lent before copies from and to a host tier have arrived."""
        return False

    def can_lend(self, num_tokens: int, num_states: int) -> bool:
        """True if `num_tokens` and `num_states`, which are free, can be lent now."""
        return True

    # Slots

    def has_slot_for_copy(self, source: Node, core: MarconiTreeCore) -> bool:
        """True if a request that starts from `source` finds a slot for its copy: SGLang evicts for it."""
        return True

    def reserved(self, reqs: "list[Req]", num_locked: int) -> Amount:
        """Memory that requests take before the states of the next prefill, of `reqs`, join the tree.

        `num_locked` states are locked now. SGLang takes slots for `reqs` in `mem_cache/allocation.py:
        ensure_mamba_capacity`.
        """
        pool = self.req_to_token_pool
        num_tracking = pool.mamba_initial_tracking_slots
        batch = [
            Missing(
                len(req.full_untruncated_fill_ids) - req.prefix_len,
                (not req.kv.holds_mamba) + (num_tracking if req.kv.mamba_ping_pong_track_buffer is None else 0),
                req.kv.cache_protected_len > 0,
            )
            for req in reqs
        ]
        num_free = pool.available_size() - sum([req.kv.req_pool_idx is None for req in reqs])
        page = self.token_to_kv_pool_allocator.page_size
        return reserved(batch, Rows(pool.size, num_free, 1 + num_tracking, num_locked, page), self.are_slots_shared)

    def spares_slot(self, evictable: Amount, reserved: Amount) -> bool:
        """True if a slot beyond `reserved` is free once everything `evictable` is evicted."""
        return bool(self.state_slots.available_size() + evictable.num_states > reserved.num_states)

    def take_planned(self) -> torch.Tensor | None:
        """A free slot for a planned state, if there is one."""
        slot: torch.Tensor | None = self.state_slots.alloc(1)
        return slot

    def promise(self) -> bool:
        """True if the tree can take the last state of a request: it takes the slot with it."""
        return True

    def join(self, slots: dict[int, torch.Tensor], end_depth: int | None) -> dict[int, torch.Tensor]:
        """The slots in which the tree will hold the states in `slots`, by depth.

        The one at `end_depth` is a request's own, which the request gives back.
        """
        return slots

    def free_unkept(self, slots: Iterable[torch.Tensor]) -> None:
        """Free the slots of planned states that the tree will not have."""
        self.free(slots)

    def free(self, slots: Iterable[torch.Tensor]) -> None:
        """Free slots of the tree's."""
        for slot in slots:
            self.state_slots.free(slot)

    # Victims

    def evict(
        self, core: MarconiTreeCore, params: EvictParams, targets: Targets, available: Callable[[Any], int]
    ) -> Freed:
        """Evict what `params` asks for, KV before states, or until `targets` are met, of which `available` tells.

        For a target until nothing is left, as SGLang's own loop does.
        """
        freed = Freed(0, 0)
        for short, num_wanted in ((ComponentType.FULL, params.num_tokens), (ComponentType.MAMBA, params.mamba_num)):
            target = targets.get(short)
            num_short = None if target is None else partial(self._num_short, core, available, *target)
            if target is not None and short is ComponentType.FULL and num_wanted > 0:
                num_wanted = max(num_wanted, core.full_evictable_size())
            freed = core.evict_until(short, num_wanted, freed, num_short)
        return freed

    def _num_short(
        self, core: MarconiTreeCore, available: Callable[[Any], int], component: Any, num_wanted: int
    ) -> int:
        """How much is missing of a target once all that is free has been given back."""
        self.give_back(core)
        return num_wanted - available(component)

    def give_back(self, core: MarconiTreeCore) -> None:
        """Give SGLang's allocators what the tree no longer holds."""
        core.memory.give_back(self.token_to_kv_pool_allocator, self.state_slots)


def num_drawn(slots: Any) -> int:
    """Slots that SGLang's allocator has drawn for what waits and not yet lent."""
    return length_hint(slots._alloc_iter) if slots._alloc_iter is not None else 0
