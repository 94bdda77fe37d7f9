"""The machine that would serve, which need not be the one that is asked on."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from unittest.mock import patch

from sglang.srt.arg_groups import memory_hook
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.cuda_graph_config import Backend

from marconi.replay.memory import MemorySize, MemoryUnit


class Platform(StrEnum):
    """The platform that a server would find."""

    CUDA = "cuda"
    CPU = "cpu"
    """`marconi_cpu`."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A platform, and its cards; None for what is not known of them."""

    platform: Platform = Platform.CUDA
    memory: MemorySize | None = None
    """Bytes on one card."""
    weights: MemorySize | None = None
    """On one card; None for what the configuration says, shared by the ranks."""

    def __post_init__(self) -> None:
        """`ValueError` for an amount that is none of bytes."""
        for option, size in (("--gpu-memory", self.memory), ("--weights", self.weights)):
            if size is not None and size.unit is not MemoryUnit.BYTES:
                raise ValueError(f"{option} must be a size such as 80GB, got one that is relative")
        if self.weights is not None and self.memory is None:
            raise ValueError("--weights needs --gpu-memory beside it")
        if self.memory is not None and self.is_cpu:
            raise ValueError("--gpu-memory is of a card, and --platform cpu has none: give one of them")

    @property
    def is_cpu(self) -> bool:
        """True on the platform `marconi_cpu`."""
        return self.platform is Platform.CPU

    def over(self, times_ranks: int) -> "Machine":
        """The same cards, with the model over so many times as many."""
        if self.weights is None:
            return self
        return replace(self, weights=replace(self.weights, amount=self.weights.amount / times_ranks))

    @contextmanager
    def as_sglang_finds_it(self) -> Iterator[None]:
        """Let SGLang's defaults by device be those of this machine, and silence what it logs about them."""
        with ExitStack() as stack:
            stack.callback(logging.disable, logging.NOTSET)
            logging.disable(logging.WARNING)
            if not self.is_cpu:
                stack.enter_context(
                    patch.object(cuda_graph_config, "default_prefill_backend", lambda: Backend.BREAKABLE)
                )
            if self.memory is not None:
                mebibytes = self.memory.amount / 2**20
                stack.enter_context(patch.object(memory_hook, "get_device_memory_capacity", lambda _: mebibytes))
            yield
