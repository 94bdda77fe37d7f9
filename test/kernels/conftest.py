"""Where the kernels run: natively on a CUDA device, else in Triton's interpreter.

It has to be chosen before Triton is imported: `test_interpreter.py` runs `test_*_kernel.py` in a process of their own,
and without a device the suite's process runs none of them.
"""

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if IS_INTERPRETED or torch.cuda.is_available() else ["test_*_kernel.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """What the kernels run on."""
    return torch.device("cpu" if IS_INTERPRETED else "cuda")
