"""SGLang's server with hooks that raise where a file says so, named by `MARCONI_TEST_FAULT_FILE`.

The file holds `NAME WHEN RANKS`: a hook as `upstream.toml` spells it or a kernel as `KERNELS` here does, `before` or
`after` its work, on rank `1` or `all`; nothing, where nothing raises. A flush plans again, so that one server has one
fault after the other. `MARCONI_TEST_CONTROL` takes out what the tests are about:

    unguarded   what a hook raises is not caught
    trusting    what was not written counts as written, and planning goes on
    leaking     the slots of states that nobody wrote are not freed

Started in place of `-m sglang.launch_server`; the spawned scheduler imports this file too.
"""

import importlib
import os
import runpy
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import breaking
from sglang.srt.runtime_context import get_parallel

from marconi.engine import faults
from marconi.engine.cache import pools
from marconi.engine.cache import radix_cache as cache
from marconi.engine.launch.policies import JUDICIOUS
from marconi.engine.plugin import touch, upstream
from marconi.engine.prefill import operands, spans

KERNELS = ("short_conv.checkpoint", "gated_delta_rule.checkpoint", "mamba2.checkpoint", "state_copy.copy")
CONTROL = os.environ.get("MARCONI_TEST_CONTROL")


class Planted(Exception):
    """Raised by a hook."""


def asked(name: str) -> str:
    """When `name` is to raise in this process: `before`, `after`, or never."""
    words = Path(os.environ["MARCONI_TEST_FAULT_FILE"]).read_text(encoding="utf-8").split()
    if not words or words[0] != name or (words[2] != "all" and int(words[2]) != get_parallel().attn_tp_rank):
        return ""
    return words[1]


def faulty(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        when = asked(name)
        if when == "before":
            raise Planted(name)
        result = function(*args, **kwargs)
        if when == "after":
            raise Planted(name)
        return result

    return run


def plant() -> None:
    for group in upstream.GROUPS:
        for each in filter(group.passes_over, group.hooks):
            module, _, name = each.hook.rpartition(".")
            setattr(importlib.import_module(f"marconi.engine.{module}"), name, faulty(each.hook, each.function))
    for kernel in KERNELS:
        operator, name = kernel.split(".")
        user = spans if operator == "state_copy" else operands
        whole = getattr(user, operator)
        setattr(user, operator, SimpleNamespace(**vars(whole) | {name: faulty(kernel, getattr(whole, name))}))


def let_flushes_plan_again() -> None:
    reset = cache.MarconiRadixCache.reset

    def anew(self: Any) -> None:
        reset(self)
        self.faults.__init__()
        # Where SGLang has tracked since, requests have had the slots that they lend.
        if not getattr(self, "cuts_prefills", True):
            self.req_to_token_pool.mamba_initial_tracking_slots -= self._num_lent
        self.plans = self.cuts_prefills = self.choice.admission == JUDICIOUS

    cache.MarconiRadixCache.reset = anew  # type: ignore[method-assign]


def take_out() -> None:
    settle = cache.settle

    def trusting(checkpoints: Any, *given: Any) -> None:
        settle(checkpoints, *given)
        breaking.tell(sum(not each.is_written for each in checkpoints))
        for each in checkpoints:
            each.is_written = True

    if CONTROL == "unguarded":
        touch._put_in = lambda _, each: each.function
    if CONTROL == "trusting":
        cache.settle = trusting  # type: ignore[assignment]
        faults.Faults.note = lambda *_: None  # type: ignore[method-assign]
    if CONTROL == "leaking":
        pools.DevicePools.free_unkept = lambda *_: None  # type: ignore[method-assign]


plant()
let_flushes_plan_again()
take_out()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)
