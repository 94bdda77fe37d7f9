"""The CPU platform as a server's cache knows it; the platform itself, `marconi_cpu`, is loaded by SGLang."""

import os
from collections.abc import MutableMapping
from typing import Final

PLATFORM: Final = "marconi_cpu"
"""The value of `SGLANG_PLATFORM` that chooses it."""
GROUPS: Final = "marconi_cpu.upstream.GROUPS"
"""Dotted path of what it changes of SGLang."""
RESOLVED_HERE: Final = "marconi_cpu.joint_pool.resolved_here"
"""Dotted path of the context in which arguments are resolved as on it, where nothing is served."""

# SGLang's snapshots take up to three slots a running request; the rest is for the prefix cache.
NUM_STATE_SLOTS: Final = 128
NUM_KV_TOKENS: Final = 65536


def is_active() -> bool:
    """True if this process was asked to serve on the CPU platform."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM


def has_accelerator() -> bool:
    """True if torch finds a device that SGLang serves on without this project's CPU platform."""
    import torch

    return torch.accelerator.is_available()


def choose_platform(env: MutableMapping[str, str]) -> None:
    """Choose the CPU platform in `env` where there is no accelerator and none was chosen."""
    if "SGLANG_PLATFORM" not in env and not has_accelerator():
        env["SGLANG_PLATFORM"] = PLATFORM
