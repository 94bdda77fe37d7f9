"""Ray on this machine: no network, little memory, and nothing left of it afterwards."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray import serve

from marconi_ray import application

OBJECT_STORE_BYTES = 80 << 20
_PATH = str(Path(__file__).parents[2] / "python")


@contextmanager
def cluster() -> Iterator[str]:
    """The URL of Serve's proxy."""
    before = descendants()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray's workers are nice to others, and what they start with them: a busy machine would starve the servers.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - as Ray has it
    # Without one of its own Ray would leave a token in the home directory.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        _start()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        started = descendants() - before
        serve.shutdown()
        ray.shutdown()
        _, alive = psutil.wait_procs(started, timeout=60)
        for process in alive:
            process.kill()
    assert not alive, f"left behind: {alive}"


def _start() -> None:
    for attempt in range(3):
        try:
            ray.init(
                address="local",
                num_cpus=8,
                num_gpus=0,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([_PATH, os.environ.get("PYTHONPATH", "")])}},
            )
        except Exception as error:
            # Ray gives its own processes 30 s to start, which a busy machine may need more of.
            if attempt == 2 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
        else:
            return


@contextmanager
def running(url: str, **args: Any) -> Iterator[httpx.Client]:
    """A client of an application that answers; the application goes when the block ends."""
    serve.run(application(args), name="app", route_prefix="/")
    try:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            yield client
    finally:
        serve.delete("app")


def descendants() -> set[psutil.Process]:
    """All processes that this one has started, and theirs."""
    return set(psutil.Process().children(recursive=True))


def command_of(process: psutil.Process) -> str:
    """Empty where it has gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def until(holds: Callable[[], bool], timeout_s: float = 120.0) -> None:
    """Wait until something holds; `AssertionError` if it never does."""
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s, "it never came to be"
        time.sleep(0.05)
