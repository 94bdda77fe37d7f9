"""What the tests of the kernels' benchmark share: its parts, a clock with a script, a layer in SGLang's place."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .scripts import load

PACKAGE = load("kernels").__name__
CPU = torch.device("cpu")


def part(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}")


operands, shapes, timing = part("operands"), part("shapes"), part("timing")


def sample(median_us: float) -> Any:
    return timing.Sample(median_us, median_us, 1.0, 3)


def tiny(family: Any, **other: int) -> Any:
    """Tiles of 64 do not divide its rows, and heads share keys."""
    given = {"num_heads": 4, "num_shared_heads": 2, "num_rows": 80, "num_columns": 16, "chunk_size": 64, **other}
    return shapes.LayerShape("tiny", family, source="", **given)


class ScriptedClock:
    """A clock that runs what it times and reads the next of given times, over and over."""

    def __init__(self, *times_us: float) -> None:
        self.times_us = times_us
        self.num_read = 0

    def read(self, run: Callable[[], object]) -> Any:
        run()
        self.num_read += 1
        return timing.Reading(self.times_us[(self.num_read - 1) % len(self.times_us)], 5.0)


class OwnLayer:
    """In SGLang's place: operands that were made up, and tracking in the chunk kernel that takes 2 us more."""

    def __init__(self, shape: Any, given: Any, pools: Any, dtype: Any) -> None:
        self.inputs = torch.randn(given.num_tokens, shape.num_channels, dtype=dtype)
        self.in_kernel = {"tracking": lambda: None, "not_tracking": lambda: None}
        self.operands = lambda: operands.stand_in(shape, given, dtype, CPU)

    def prefill(self) -> None:
        pass

    def track(self) -> None:
        pass
