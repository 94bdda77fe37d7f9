"""The factory behind `--radix-cache-backend marconi`.

A model without recurrent layers has nothing that this project adds to, and gets the cache that SGLang itself would
build. A hybrid one gets `MarconiRadixCache` (`cache.py`), on the tree core of `core/`.
"""

import logging
import os
from typing import TYPE_CHECKING

import sglang.version
from sglang.srt.mem_cache.registry import create_unified_radix_cache, default_radix_cache_factory

from marconi.engine.cache import MarconiRadixCache, register_tree_core
from marconi.engine.cache_touches import SCHEDULER_TOUCHES
from marconi.engine.ledger import server_touches
from marconi.engine.startup import BACKEND, StartFailure
from marconi.engine.support import require_supported
from marconi.engine.touch import hook_into, require_hooked
from marconi.engine.version import require_verified

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)


def build(ctx: "TreeCacheBuildContext") -> "BasePrefixCache":
    """The factory behind `--radix-cache-backend marconi`; raises `Refusal` if a hook did not take effect."""
    require_verified(sglang.version.__version__, os.environ)
    require_hooked(server_touches())
    if ctx.is_hybrid_ssm and not ctx.disable_radix_cache:
        require_supported(ctx.server_args, has_sliding_window=ctx.is_hybrid_swa)
    StartFailure.remove()
    if not ctx.is_hybrid_ssm:
        logger.info("marconi: this model has no recurrent layers, its cache is SGLang's own")
        return default_radix_cache_factory(ctx)
    if ctx.disable_radix_cache:
        return default_radix_cache_factory(ctx)
    hook_into(SCHEDULER_TOUCHES)
    register_tree_core()
    ctx.params.tree_core_backend = BACKEND
    hf_config = ctx.model_config.hf_config.to_dict()
    return create_unified_radix_cache(ctx, cache_class=lambda params: MarconiRadixCache(params, hf_config))
