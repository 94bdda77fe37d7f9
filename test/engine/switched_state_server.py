"""SGLang's server whose states break while the file named by `MARCONI_BREAK_STATES` exists: copied ones become zeros.

As `broken_state_server.py`, for tests that have one server for what they test and for its negative control.
"""

import os
import runpy
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def lose_copied_state(_result: None, pool: Any, _src: Any, dst: Any) -> None:
    if Path(os.environ["MARCONI_BREAK_STATES"]).exists():
        pool.mamba_cache.temporal[:, dst] = 0


HookRegistry.register("sglang.srt.mem_cache.memory_pool.MambaPool.copy_from", lose_copied_state, HookType.AFTER)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
