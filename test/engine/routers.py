"""`marconi router` as a process in front of servers, and what it says of itself."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP
from .listener import listener, told_by
from .processes import free_ports


@dataclass(frozen=True)
class Router:
    """A router's process."""

    url: str
    workers: tuple[ServerProcess, ...]

    def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return HTTP.post(self.url + path, json=body, timeout=120.0, **options)

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = HTTP.get(f"{self.url}/router", timeout=30.0).json()
        return state

    def latest(self) -> dict[str, Any]:
        record: dict[str, Any] = self.state()["recent"][0]
        return record

    def until(self, holds: Callable[[dict[str, Any]], bool], within_s: float = 60.0) -> None:
        give_up_s = time.monotonic() + within_s
        while not holds(state := self.state()):
            assert time.monotonic() < give_up_s, state["workers"]
            time.sleep(0.05)

    def until_told(self) -> None:
        """Until nothing runs, and the router knows of as much as a snapshot of each worker has."""

        def is_told(state: dict[str, Any]) -> bool:
            known = [each["events"]["num_entries"] for each in state["workers"]]
            is_running = any(each["num_running"] for each in state["workers"])
            return not is_running and known == [num_held(worker.url) for worker in self.workers]

        self.until(is_told)


def num_held(url: str) -> int:
    """Blocks and states of an idle server, once all of them are published."""
    give_up_s = time.monotonic() + 60
    while told_by(url)["num_waiting"]:
        assert time.monotonic() < give_up_s, "it publishes nothing"
        time.sleep(0.05)
    with listener(url) as heard:
        return sum(map(len, heard.held_by(heard.settle())))


def arguments(workers: Sequence[str], model: Path, port: int, *more: str) -> list[str]:
    command = [sys.executable, "-m", "marconi", "router", "--workers", ",".join(workers), "--model", str(model)]
    return [*command, "--port", str(port), *more]


@contextmanager
def running(workers: tuple[ServerProcess, ...], model: Path, log_path: Path) -> Iterator[Router]:
    """A router whose workers are all up."""
    port = free_ports(1)
    with log_path.open("wb") as log:
        process = subprocess.Popen(arguments([worker.url for worker in workers], model, port), stdout=log, stderr=log)
    try:
        made = Router(f"http://127.0.0.1:{port}", workers)
        _wait_until_healthy(made.url, process)
        made.until(lambda state: all(worker["condition"] == "up" for worker in state["workers"]))
        yield made
    finally:
        _stop(process)


def _wait_until_healthy(url: str, process: "subprocess.Popen[bytes]") -> None:
    give_up_s = time.monotonic() + 120
    while time.monotonic() < give_up_s:
        assert process.poll() is None, "the router ended"
        try:
            if HTTP.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError("the router never had a worker")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def greedy(num_tokens: int = 4) -> dict[str, Any]:
    return {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
