"""Nothing of a server outlives its replica, however the replica or the guard ends."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SGLang and its parent's death signal are Linux's")

SERVER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
REPLICA = (
    "import subprocess, sys, time; "
    "subprocess.Popen([sys.executable, '-m', 'marconi.router.ray_serve.guard', *sys.argv[1:]], stdin=subprocess.PIPE); "
    "time.sleep(600)"
)


@contextmanager
def guarded(tmp_path: Path) -> Iterator["tuple[subprocess.Popen[bytes], int]"]:
    """A guard, and the process id of what it guards."""
    note = tmp_path / "pid"
    command = [sys.executable, "-m", "marconi.router.ray_serve.guard", sys.executable, "-c", SERVER, str(note)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        yield guard, noted(note)
    finally:
        guard.kill()
        guard.wait()
        assert guard.stdin is not None
        guard.stdin.close()


def noted(note: Path) -> int:
    give_up_s = time.monotonic() + 30
    while not (note.exists() and note.read_text()):
        assert time.monotonic() < give_up_s, "it was never started"
        time.sleep(0.01)
    return int(note.read_text())


def is_gone(pid: int) -> bool:
    give_up_s = time.monotonic() + 30
    while time.monotonic() < give_up_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_it_ends_when_its_replica_lets_go(tmp_path: Path) -> None:
    with guarded(tmp_path) as (guard, server):
        assert guard.stdin is not None
        guard.stdin.close()
        assert is_gone(server)
        assert guard.wait(30) != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_its_guard(tmp_path: Path, number: signal.Signals) -> None:
    with guarded(tmp_path) as (guard, server):
        guard.send_signal(number)
        assert is_gone(server)


def test_it_ends_when_its_replica_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    replica = subprocess.Popen([sys.executable, "-c", REPLICA, sys.executable, "-c", SERVER, str(note)])
    try:
        server = noted(note)
    finally:
        replica.kill()
        replica.wait()
    assert is_gone(server)


def test_a_server_that_ends_by_itself_gives_its_status() -> None:
    command = [sys.executable, "-m", "marconi.router.ray_serve.guard", sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as guard:
        assert guard.wait(30) == 7
