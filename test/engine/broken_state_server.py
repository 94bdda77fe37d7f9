"""SGLang's server with a fault: the state that a cache hit copies arrives as zeros.

The negative control of the exactness tests. Started in place of `-m sglang.launch_server`; the spawned scheduler
imports this file too, and so gets the fault.
"""

import runpy
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def lose_copied_state(_result: None, pool: Any, _src: Any, dst: Any) -> None:
    pool.mamba_cache.temporal[:, dst] = 0


HookRegistry.register("sglang.srt.mem_cache.memory_pool.MambaPool.copy_from", lose_copied_state, HookType.AFTER)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
