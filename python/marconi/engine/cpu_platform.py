"""The CPU platform as a server's cache knows it; the platform itself, `marconi.cpu`, is loaded by SGLang."""

import os
from typing import Final

PLATFORM: Final = "marconi_cpu"
"""The value of `SGLANG_PLATFORM` that chooses it."""
GROUPS: Final = "marconi.cpu.upstream.GROUPS"
"""Dotted path of what it changes of SGLang."""

# SGLang's snapshots take up to three slots a running request; the rest is for the prefix cache.
NUM_STATE_SLOTS: Final = 128
NUM_KV_TOKENS: Final = 65536


def is_active() -> bool:
    """True if this process was asked to serve on the CPU platform."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM
