"""The platform that SGLang serves on in tests: on a machine without an accelerator the CPU platform."""

import os
from contextlib import suppress

from marconi.engine.cpu_platform import choose_platform


def choose() -> None:
    """Choose it for this process and those it starts.

    It imports torch, so only folders do so that need torch: `import FOLDER` is before any import of SGLang there.
    """
    with suppress(ImportError):  # no torch, and no SGLang
        choose_platform(os.environ)
