"""The tree core `marconi`, chosen by `CacheInitParams.tree_core_backend`; its cache makes it."""

from typing import Any

from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.tree_core_registry import get_tree_core_factory, register_tree_core_backend

from marconi.engine.cache.tree_core import MarconiTreeCore
from marconi.engine.launch.flags import BACKEND


def register_tree_core() -> None:
    """Make the tree core known to SGLang, once."""

    def make(params: CacheInitParams, components: dict[Any, Any]) -> MarconiTreeCore:
        core: MarconiTreeCore = next(iter(components.values())).cache.make_tree_core(params)
        return core

    if get_tree_core_factory(BACKEND) is None:
        register_tree_core_backend(BACKEND, make)
