"""The machine that would serve, which need not be the one that is asked on."""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from marconi.replay.memory import MemorySize, MemoryUnit


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
