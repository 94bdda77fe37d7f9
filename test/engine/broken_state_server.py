"""SGLang's server with a fault: the state that a cache hit copies arrives as zeros.

The negative control of the exactness tests. With `MARCONI_BREAK_STATES` in the environment states break only while the
file exists that it names, for tests that have one server for what they test and for their control. Started in place of
`-m sglang.launch_server`; the spawned scheduler imports this file too, and so gets the fault.
"""

import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import breaking
from sglang.srt.mem_cache import unified_draft_pool, unified_memory_pool  # noqa: F401, pools of states are among them
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

SWITCH = os.environ.get(breaking.SWITCH)


def lose_copied_state(_result: None, pool: Any, _src: Any, dst: Any) -> None:
    if SWITCH is None or Path(SWITCH).exists():
        parts = [each for each in (*pool.mamba_cache.conv, pool.mamba_cache.temporal) if each.numel()]
        # (layers, slots): a state that was zeros is not broken.
        breaking.tell(int(sum(each[:, dst].flatten(2).any(2).any(0) for each in parts).bool().sum()))
        for each in parts:
            each[:, dst] = 0


def with_subclasses(each: type) -> Iterator[type]:
    yield each
    for subclass in each.__subclasses__():
        yield from with_subclasses(subclass)


for each in with_subclasses(MambaPool):
    if "copy_from" in vars(each):
        HookRegistry.register(f"{each.__module__}.{each.__qualname__}.copy_from", lose_copied_state, HookType.AFTER)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
