"""The machine that would serve, which need not be the one that is asked on.

SGLang resolves its arguments by the platform that it finds. What it would find on this machine is put in its place for
as long as that takes: on CUDA a card of the generation that is asked about, as nothing in a command line names one.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final
from unittest.mock import patch

import torch
from huggingface_hub import constants as hub
from sglang.srt import platforms
from sglang.srt.arg_groups import mamba_hook, memory_hook, model_override_base, speculative_hook
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.platforms.cuda import CudaSRTPlatform
from sglang.srt.runtime_context import override_platform

from marconi.engine.cpu_platform import RESOLVED_HERE
from marconi.engine.launch.split import unnoticed
from marconi.engine.plugin.touch import resolve
from marconi.replay.memory import MemorySize, MemoryUnit

_KNOW_THE_PLATFORM: Final = (platforms, mamba_hook, model_override_base, speculative_hook)
"""Modules that have imported it by name."""


class Platform(StrEnum):
    """The platform that a server would find."""

    CUDA = "cuda"
    CPU = "cpu"
    """`marconi_cpu`."""


class Generation(StrEnum):
    """The generation of a card, by which SGLang and its kernels choose and refuse."""

    AMPERE = "ampere"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"
    """The data centre's: B200, B300 and those in GB200 and GB300."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability."""
        return {Generation.AMPERE: (8, 0), Generation.HOPPER: (9, 0), Generation.BLACKWELL: (10, 0)}[self]

    @property
    def facts(self) -> dict[str, Any]:
        """The card in the terms of SGLang's `PlatformContext`."""
        major, minor = self.capability
        is_hopper, is_blackwell = self is Generation.HOPPER, self is Generation.BLACKWELL
        return {
            **dict.fromkeys(("is_hip", "is_npu", "is_xpu", "is_musa", "is_mps", "has_amx"), False),
            **dict.fromkeys(("is_sm110", "is_sm120"), False),
            **dict.fromkeys(("is_cuda", "has_flashinfer"), True),
            **dict.fromkeys(("is_sm90", "is_hopper_with_cuda_12_3"), is_hopper),
            **dict.fromkeys(("is_sm100", "is_sm100_or_sm110", "is_blackwell"), is_blackwell),
            "device_capability": (major, minor),
            "device_sm": 10 * major + minor,
        }


@dataclass(frozen=True, slots=True)
class Machine:
    """A platform and its cards; unknown fields are None."""

    platform: Platform = Platform.CUDA
    memory: MemorySize | None = None
    """Bytes on one card."""
    weights: MemorySize | None = None
    """On one card; None for what the configuration says, shared by the ranks."""
    card: Generation = Generation.HOPPER
    """Its generation."""

    def __post_init__(self) -> None:
        """`ValueError` for an amount that is none of bytes."""
        for option, size in (("--gpu-memory", self.memory), ("--weights", self.weights)):
            if size is not None and size.unit is not MemoryUnit.BYTES:
                raise ValueError(f"{option} must be a size such as 80GB, got one that is relative")
        if self.weights is not None and self.memory is None:
            raise ValueError("--gpu-memory must be given with --weights, got none")
        if self.memory is not None and self.is_cpu:
            raise ValueError("--gpu-memory must be left out with --platform cpu, which has no card")

    @property
    def is_cpu(self) -> bool:
        """True on the platform `marconi_cpu`."""
        return self.platform is Platform.CPU

    def over(self, times_ranks: int) -> "Machine":
        """The same cards, with the model over `times_ranks` times as many."""
        if self.weights is None:
            return self
        return replace(self, weights=replace(self.weights, amount=self.weights.amount / times_ranks))

    @contextmanager
    def as_sglang_finds_it(self) -> Iterator[None]:
        """Let SGLang find this machine and no hub, and leave no trace of what it resolves: no log, no environment."""
        with unnoticed(), ExitStack() as stack:
            stack.enter_context(patch.object(hub, "HF_HUB_OFFLINE", True))
            if self.is_cpu:
                stack.enter_context(resolve(RESOLVED_HERE)())
            else:
                self._put_card(stack)
            yield

    def _put_card(self, stack: ExitStack) -> None:
        mebibytes = None if self.memory is None else self.memory.amount / 2**20
        stack.enter_context(override_platform(**self.card.facts))
        stack.enter_context(patch.object(torch.cuda, "get_device_capability", lambda *_: self.card.capability))
        stack.enter_context(patch.object(cuda_graph_config, "default_prefill_backend", lambda: Backend.BREAKABLE))
        platform = CudaSRTPlatform()
        for module in _KNOW_THE_PLATFORM:
            stack.enter_context(patch.object(module, "current_platform", platform))
        stack.enter_context(patch.object(memory_hook, "get_device_memory_capacity", lambda _: mebibytes))
