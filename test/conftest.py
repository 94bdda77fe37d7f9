"""What every test shares: the options, and what needs a GPU or a browser."""

import gc
import importlib.util
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from durations import Budgets
from marconi import process
from sglang_platform import choose

if TYPE_CHECKING:
    from xdist.scheduler import Scheduling

# Before torch is: processes that share the cores take one each, or their threads wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A million objects are imported and collected that stay to the end: to look through them again and again takes seconds.
gc.disable()

# The same examples in every run, and none fails because a machine is busy. Soaks draw others.
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

SHARING = {
    f"test/engine/test_{name}.py"
    for name in (
        *("exactness", "explain", "explain_text", "fork", "hints", "joint_server", "picture", "runtime_endpoints"),
        *("server", "typed"),
    )
}
"""Files whose tests share servers."""
MATRIX_SERVER = re.compile(r"\[(?:gdn|mamba2)-[\w-]+-(?:1|16)-(?:whole|prefill)\b")
"""The name of a server of the matrix (`engine/matrix.py`), which tests of several files share. One runs at a time: with
two ranks and two roles it takes up to eight processes of a gigabyte."""
CHROMIUM = Path("/usr/bin/chromium")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--broken-states",
        action="store_true",
        help="break a state whenever a hit copies it: the exactness suite must turn red",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Ended from outside (a time limit, a supervisor), the fixtures still stop the servers that they started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # SGLang takes further ports, at distances from a server's own, which another worker of xdist would find free.
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        config.pluginmanager.register(Budgets())
    else:
        ports, num = process._PORTS, len(process._PORTS) // 2
        process._PORTS = ports[int(worker.removeprefix("gw")) % 2 * num :][:num]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "Scheduling":
    """With `-n 2` a file's tests run in one process, and in one those of all files that share servers."""
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = super()._split_scope(nodeid)
            return "matrix" if MATRIX_SERVER.search(nodeid) else "servers" if path in SHARING else path

    return ByServer(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked so, one case in that many is not slow."""
    num_cases: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("one_in")
        if marker is not None:
            test = item.nodeid.partition("[")[0]
            if num_cases[test] % marker.args[0]:
                item.add_marker(pytest.mark.slow)
            num_cases[test] += 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("NEEDS A CUDA DEVICE, none found: this test did not run")
    if item.get_closest_marker("browser") is not None:
        if not CHROMIUM.exists():
            pytest.skip(f"NEEDS {CHROMIUM}, not found: this test did not run")
        for name in ("playwright", "axe_playwright_python"):
            if importlib.util.find_spec(name) is None:
                pytest.skip(f"NEEDS {name}, not installed: this test did not run")


@pytest.fixture(scope="module")
def sglang_configuration() -> Iterator[None]:
    """Put back what caches and benchmarks set for the process: SGLang's configuration, its log, torch's threads."""
    choose()
    import torch
    from sglang.srt import runtime_context

    before, disabled, num_threads = (
        runtime_context.snapshot_context(),
        logging.root.manager.disable,
        torch.get_num_threads(),
    )
    yield
    runtime_context.restore_context(before)
    logging.disable(disabled)
    torch.set_num_threads(num_threads)
