"""SGLang's pools of a hybrid model with sliding windows: a third one, whose KV is evicted with states.

Owner: the cache, on the scheduler's thread.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from marconi.engine.cache.pools import DevicePools, Targets
from marconi.policy.base import Need
from marconi.tree import Freed

if TYPE_CHECKING:
    from marconi.engine.cache.tree_core import MarconiTreeCore


class WindowedPools(DevicePools):
    """Two pools, and one of windows. A slot is a tensor of one index."""

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the pool of full attention holds."""
        return int(self.token_to_kv_pool_allocator.size_full)

    @property
    def num_free_kv_tokens(self) -> int:
        """Tokens of it that are not lent."""
        return int(self.token_to_kv_pool_allocator.full_available_size())

    def evict(
        self, core: "MarconiTreeCore", params: EvictParams, targets: Targets, available: Callable[[Any], int]
    ) -> Freed:
        """Evict what `params` asks for, windows last; SGLang has no use for their number where there is a target."""
        before = core.memory.num_window_tokens
        freed, target = super().evict(core, params, targets, available), targets.get(ComponentType.SWA)
        while before - core.memory.num_window_tokens < params.swa_num_tokens:
            if target is not None and self._num_short(core, available, *target) <= 0:
                break
            one = core.evict_one(Need.STATE)
            if one is None:
                break
            freed = Freed(freed.num_tokens + one.num_tokens, freed.num_states + one.num_states)
        return freed
