"""A machine in the place of this one.

SGLang resolves its arguments by the platform that it finds. What it would find on this machine is put in its place for
as long as that takes: on CUDA a card of the generation that is asked about, as nothing in a command line names one.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final
from unittest.mock import patch

import torch
from huggingface_hub import constants as hub
from sglang.srt import platforms
from sglang.srt.arg_groups import mamba_hook, memory_hook, model_override_base, speculative_hook
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.platforms.cuda import CudaSRTPlatform
from sglang.srt.runtime_context import override_platform

from marconi.check.machine import Machine
from marconi.engine.cpu_platform import RESOLVED_HERE
from marconi.engine.launch.split import unnoticed
from marconi.engine.plugin.touch import resolve

_KNOW_THE_PLATFORM: Final = (platforms, mamba_hook, model_override_base, speculative_hook)
"""Modules that have imported it by name."""


@contextmanager
def as_sglang_finds(machine: Machine) -> Iterator[None]:
    """Let SGLang find `machine` and no hub, and leave no trace of what it resolves: no log, no environment."""
    with unnoticed(), ExitStack() as stack:
        stack.enter_context(patch.object(hub, "HF_HUB_OFFLINE", True))
        if machine.is_cpu:
            stack.enter_context(resolve(RESOLVED_HERE)())
        else:
            _put_card(machine, stack)
        yield


def _put_card(machine: Machine, stack: ExitStack) -> None:
    mebibytes = None if machine.memory is None else machine.memory.amount / 2**20
    stack.enter_context(override_platform(**machine.card.facts))
    stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda *_: machine.card.capability))
    stack.enter_context(patch.object(cuda_graph_config, "default_prefill_backend", lambda: Backend.BREAKABLE))
    platform = CudaSRTPlatform()
    for module in _KNOW_THE_PLATFORM:
        stack.enter_context(patch.object(module, "current_platform", platform))
    stack.enter_context(patch.object(memory_hook, "get_device_memory_capacity", lambda _: mebibytes))
