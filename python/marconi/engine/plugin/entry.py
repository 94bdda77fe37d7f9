"""The entry point in `sglang.srt.plugins`: backend, flags and refusals, in every process of a server.

Runs before any argument is parsed, so it only registers; SGLang applies the hooks afterwards. Whether they took
effect is checked where it can be refused: by `startup` before a process is started, and by the backend itself.
"""

from typing import Any

from sglang.srt.mem_cache.registry import register_radix_cache_backend

from marconi.engine.launch.flags import BACKEND
from marconi.engine.plugin import touch, upstream


def register() -> None:
    """Register the backend `marconi` and the hooks behind its flags."""
    register_radix_cache_backend(BACKEND, _build_cache)
    touch.register(upstream.PLUGIN)


def _build_cache(ctx: Any) -> Any:
    # Deferred: every process registers the backend, only a scheduler imports the cache.
    from marconi.engine.plugin.backend import build

    return build(ctx)
