"""Run the kernels' tests in a process of their own: natively on a CUDA device, the references' on a CPU.

Triton's interpreter is left out, what is timed is not what it runs, and compiling ahead of time, which needs no device.
Several processes share the tests where pytest-xdist is installed: compilers and references keep a core busy each.
"""

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import sgl_kernel_ext

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "test" / "kernels"
LEFT_OUT = ("test_interpreter.py", "test_ahead_of_time.py")
NUM_PROCESSES = 8
MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of tests that passed and were skipped, and in one line what is red, empty where nothing is."""

    num_passed: int
    num_skipped: int
    red: str


def run_tests(folder: Path = TESTS) -> Outcome:
    """Run all tests of `folder` on the package that is measured."""
    packages = str(Path(sgl_kernel_ext.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "200"}
    environment.pop("TRITON_INTERPRET", None)
    # Without the project's own options: where a plugin is missing that they name, tests run all the same.
    options: tuple[str, ...] = ("-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=no", "-rfE", "--color=no")
    if importlib.util.find_spec("xdist"):
        options += ("-n", str(min(NUM_PROCESSES, os.cpu_count() or 1)))
    left_out = [f"--ignore={folder / name}" for name in LEFT_OUT]
    run = subprocess.run(  # noqa: S603 - this Python
        [sys.executable, "-m", "pytest", *options, *left_out, str(folder)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return outcome_of(run.returncode, run.stdout, run.stderr)


def outcome_of(status: int, output: str, errors: str) -> Outcome:
    """Read the outcome from what pytest printed; without a test that passed it is red."""
    lines = output.strip().splitlines() or errors.strip().splitlines() or ["pytest printed nothing"]
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|skipped)", lines[-1])}
    passed = counts.get("passed", 0)
    named = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    red = ""
    if named:
        more = f" and {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
        red = f"{len(named)} red: {', '.join(named[:MOST_NAMED])}{more}"
    elif status or not passed:
        last = (errors.strip().splitlines() or lines)[-1]
        red = f"they did not run to their end (status {status}): {last}"
    return Outcome(passed, counts.get("skipped", 0), red)
