"""The entry point in `sglang.srt.plugins`: backend, flags and refusals, in every process of a server.

Runs before any argument is parsed, so it only registers; SGLang applies the hooks afterwards. Whether they took
effect is checked where it can be refused: by `startup` before a process is started, and by the backend itself.
"""

from typing import Any

from marconi.engine.flags import BACKEND
from marconi.engine.ledger import PLUGIN_TOUCHES
from marconi.engine.startup import StartFailure
from marconi.engine.touch import HOOKS, Kind


def register() -> None:
    """Register the backend `marconi` and the hooks behind its flags."""
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_radix_cache_backend(BACKEND, _build_cache)
    types = {Kind.AFTER: HookType.AFTER, Kind.AROUND: HookType.AROUND}
    for touch in PLUGIN_TOUCHES:
        if touch.kind in HOOKS:
            HookRegistry.register(touch.target, touch.hook, types[touch.kind])
    StartFailure.install()


def _build_cache(ctx: Any) -> Any:
    # Deferred: every process registers the backend, only a scheduler imports the cache.
    from marconi.engine.backend import build

    return build(ctx)
