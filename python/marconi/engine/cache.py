"""The backend `marconi`: SGLang's unified radix cache, with this project's accounting on it.

A model without recurrent layers has nothing that this project adds to, and gets the cache that SGLang itself
would build. A hybrid one gets `MarconiRadixCache`. Owner of both: the scheduler's thread.
"""

import logging
import os
import time
from typing import TYPE_CHECKING, Any

import sglang.version
from sglang.srt.environ import envs
from sglang.srt.mem_cache.registry import create_unified_radix_cache, default_radix_cache_factory
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from marconi.engine import flags
from marconi.engine.ledger import server_touches
from marconi.engine.report import Budget, HitReport
from marconi.engine.startup import StartFailure
from marconi.engine.touch import require_hooked
from marconi.engine.version import require_verified

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)


def build(ctx: "TreeCacheBuildContext") -> "BasePrefixCache":
    """The factory behind `--radix-cache-backend marconi`; raises `Refusal` if a hook did not take effect."""
    require_verified(sglang.version.__version__, os.environ)
    require_hooked(server_touches())
    StartFailure.remove()
    if not ctx.is_hybrid_ssm:
        logger.info("marconi: this model has no recurrent layers, its cache is SGLang's own")
        return default_radix_cache_factory(ctx)
    return create_unified_radix_cache(ctx, cache_class=MarconiRadixCache)


def total_bytes(kv_size_bytes: int | tuple[int, ...]) -> int:
    """The bytes of a KV pool: pools with keys and values apart tell two sizes, latent-attention pools one."""
    return kv_size_bytes if isinstance(kv_size_bytes, int) else sum(kv_size_bytes)


class MarconiRadixCache(UnifiedRadixCache):
    """The unified radix cache of a hybrid model.

    Source of what it extends: `srt/mem_cache/unified_radix_cache.py`.
    """

    def __init__(self, params: "CacheInitParams"):
        super().__init__(params)
        self._flags = flags.from_environ(os.environ)
        if self._flags.check_invariants is flags.Check.IDLE:
            envs.SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK.set(True)
        self._report = HitReport(self._flags.report_interval_s, started_s=time.monotonic())
        logger.info("marconi: %s", self._describe())

    def checkpoint_into_tree(self, req: "Req", *, up_to: int, **kwargs: Any) -> None:
        """Insert the request's record as upstream does, and count a finished request's hit."""
        super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        if req.finished():
            self._report.count(num_prompt_tokens=len(req.origin_input_ids), num_cached_tokens=req.cached_tokens)
            line = self._report.due(time.monotonic(), self._budgets)
            if line is not None:
                logger.info("marconi: %s", line)

    def _budgets(self) -> tuple[Budget, Budget]:
        kv, states = self.token_to_kv_pool_allocator, self.req_to_token_pool.mamba_allocator
        return (
            Budget("KV tokens", used=kv.size - kv.available_size(), size=kv.size),
            Budget("state slots", used=states.size - states.available_size(), size=states.size),
        )

    def _describe(self) -> str:
        kv, states = self._budgets()
        pool = self.req_to_token_pool.mamba_pool
        # Slot 0 is padding: the pool holds one more than it lends.
        state_bytes = pool.mamba_cache.mem_usage_bytes() // (states.size + 1)
        kv_bytes = total_bytes(self.token_to_kv_pool_allocator.get_kvcache().get_kv_size_bytes())
        return (
            f"{kv.size} KV tokens of {kv_bytes // (kv.size + self.page_size)} bytes, "
            f"{states.size} state slots of {state_bytes} bytes, page {self.page_size}, "
            f"states {'tracked while decoding' if self.enable_mamba_extra_buffer else 'kept where a request ends'}, "
            f"invariants checked: {self._flags.check_invariants}"
        )
