"""Every Triton kernel equals its reference on any machine, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parent.glob("test_*_kernel.py"))
RECURRENCES = ("test_gated_delta_rule_kernel", "test_kda_kernel", "test_mamba2_kernel")
LONG = [path for path in FILES if path.stem in RECURRENCES]
QUICK = [path for path in FILES if path not in LONG]


@pytest.mark.parametrize(
    "paths", [pytest.param(QUICK, id="quick"), pytest.param(LONG, id="recurrences", marks=pytest.mark.slow)]
)
def test_a_kernel_equals_its_reference_in_the_interpreter(paths: list[Path]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", *map(str, paths)],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
