"""SGLang's server whose checkpoints in int8 are none: its pool keeps them in float32, and rounds nothing.

With it, what is left of a server with `--enable-int8-mamba-checkpoint` are its slots and copies. Started in place of
`-m sglang.launch_server`; the spawned scheduler imports this file too.
"""

import runpy
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_STORE = "sglang.srt.mem_cache.mamba_checkpoint_pool.Int8CheckpointStore"


def widen(_result: None, store: Any, **_: Any) -> None:
    store.qdata = store.qdata.float()


def keep(_store: Callable[..., None], store: Any, slots: Any, state: Any) -> None:
    store.qdata[:, slots] = state
    store.scale[:, slots] = 1


HookRegistry.register(f"{_STORE}.__init__", widen, HookType.AFTER)
HookRegistry.register(f"{_STORE}.store", keep, HookType.AROUND)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
