"""The question to `marconi check`; a wrong one is refused in one line, before SGLang is imported, as far as can be."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from marconi.check import declared
from marconi.check.machine import Generation, Machine, Platform
from marconi.engine.launch import flags
from marconi.engine.launch.configuration import Configuration
from marconi.replay.memory import MemorySize
from marconi.replay.result import require_writable


@dataclass(frozen=True, slots=True)
class Question:
    """A command line of SGLang's, and the machine and model that it is asked about."""

    launch: tuple[str, ...]
    machine: Machine
    config: Path | None
    """The model's configuration, where it is not found by the model's path."""
    json: Path | None

    @classmethod
    def read(cls, args: argparse.Namespace) -> "Question":
        """From the words of `marconi check`; `ValueError` for wrong ones, as far as they are known without SGLang."""
        require_writable(args.json)
        memory, weights = (
            _size(option, text) for option, text in (("--gpu-memory", args.gpu_memory), ("--weights", args.weights))
        )
        machine = Machine(Platform(args.platform), memory, weights, Generation(args.gpu))
        launch = list(args.launch_args)
        if "--" in launch:
            launch.remove("--")
        _require_readable(launch, args.config, [*args.parser._option_string_actions])
        return cls(tuple(launch), machine, args.config, args.json)


def _size(option: str, text: str | None) -> MemorySize | None:
    try:
        return None if text is None else MemorySize.parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _require_readable(launch: list[str], config: Path | None, own_options: list[str]) -> None:
    given = declared.read(launch, own_options)
    if given is None:
        return
    flags.take_from(given, dict(os.environ))
    require_backend(given.radix_cache_backend)
    if given.model_path is not None:
        Configuration.find(given.model_path, config)


def require_backend(name: str | None) -> None:
    """`ValueError` for a cache that is not this one; None is the default."""
    if name not in (None, flags.BACKEND):
        raise ValueError(f"--radix-cache-backend must be {flags.BACKEND}, or left out, got {name}")
