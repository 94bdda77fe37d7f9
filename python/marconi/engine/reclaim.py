"""Evicting for the cache: victims one by one, their memory to SGLang's allocators at once.

SGLang's loop (`UnifiedRadixCache._evict_components`) walks to each victim, frees it, folds a result of dictionaries
into its totals and asks the allocator again, which takes longer than to choose a victim here. An allocator copies the
list of all that is free at every call, so what several victims free is given back in one piece.

An allocation names how much there has to be (a *target*), not how much is to go. What an allocator has rises by no more
than what it is given, so it is asked again when enough was freed to get there, and the last victim is the same as
SGLang's. KV is seen to before states, and a target for KV is gone on to until nothing is left, as there.
"""

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from marconi.engine.core.tree_core import MarconiTreeCore

Targets = Mapping[Any, tuple[Any, int]]
"""Of a component that is short, whose memory is asked about and how much of it there has to be."""


class Reclaim:
    """One call of `evict`: what has gone so far, in tokens of KV and in states."""

    __slots__ = ("_cache", "_core", "_targets", "num_states", "num_tokens")

    def __init__(self, cache: UnifiedRadixCache, core: MarconiTreeCore, targets: Targets) -> None:
        """`core` is the cache's own."""
        self._cache = cache
        self._core = core
        self._targets = targets
        self.num_tokens = 0
        self.num_states = 0

    def take(self, num_tokens: int, num_states: int) -> None:
        """Evict until so many tokens and states have gone, or there is what the targets name, or nothing may go."""
        try:
            if num_tokens > 0:
                target = self._targets.get(ComponentType.FULL)
                most = num_tokens if target is None else max(num_tokens, self._core.full_evictable_size())
                self._walk(ComponentType.FULL, most, target)
            if num_states > 0:
                self._walk(ComponentType.MAMBA, num_states, self._targets.get(ComponentType.MAMBA))
        finally:
            self._give_back()

    def _walk(self, short: ComponentType, num_wanted: int, target: tuple[Any, int] | None) -> None:
        need, evict = self._core.needs[short], self._core.evict_one
        num_to_ask_at = 0
        while (num_gone := self.num_tokens if short is ComponentType.FULL else self.num_states) < num_wanted:
            if target is not None and num_gone >= num_to_ask_at:
                num_short = self._num_short(*target)
                if num_short <= 0:
                    return
                num_to_ask_at = num_gone + num_short
            freed = evict(need)
            if freed is None:
                return
            self.num_tokens += freed.num_tokens
            self.num_states += freed.num_states

    def _num_short(self, component: Any, num_wanted: int) -> int:
        """How much is missing once all that is free has been given back."""
        self._give_back()
        return num_wanted - int(self._cache._component_available_size(component))

    def _give_back(self) -> None:
        memory = self._core.memory
        if not memory.has_freed:
            return
        for kv in memory.take_freed_kv():
            self._cache.token_to_kv_pool_allocator.free_segment(kv, start_pos=0)
        states = memory.take_freed_states()
        if states:
            slots = states[0] if len(states) == 1 else torch.cat(states)
            self._cache.req_to_token_pool.mamba_allocator.free(slots)
