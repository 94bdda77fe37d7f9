"""Every Triton kernel equals its reference on any machine, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICK = tuple(f"test_{name}_kernel" for name in ("draft_ends", "rows", "short_conv", "state_copy", "warm_up"))
FILES = [
    pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow)
    for path in sorted(Path(__file__).parent.glob("test_*_kernel.py"))
]


@pytest.mark.parametrize("path", FILES)
def test_a_kernel_equals_its_reference_in_the_interpreter(path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
