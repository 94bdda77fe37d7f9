"""Nothing of a server outlives who started it, however that or its guard ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from marconi.process import GuardedServer, ServerFailed, free_ports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="SGLang and its parent's death signal are Linux's")

SERVER = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
GUARD = (sys.executable, "-m", "marconi.process", "1")
OWNER = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE); time.sleep(600)"


@contextmanager
def guarded(tmp_path: Path) -> Iterator["tuple[subprocess.Popen[bytes], int]"]:
    """A guard, and the process id of what it guards."""
    note = tmp_path / "pid"
    guard = subprocess.Popen([*GUARD, sys.executable, "-c", SERVER, str(note)], stdin=subprocess.PIPE)
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


def test_it_ends_when_its_owner_lets_go(tmp_path: Path) -> None:
    with guarded(tmp_path) as (guard, server):
        assert guard.stdin is not None
        guard.stdin.close()
        assert is_gone(server)
        assert guard.wait(30) != 0


def test_it_ends_when_its_owner_cannot_be_heard(tmp_path: Path) -> None:
    """Standard input that is only for writing: the watch fails, and nobody else would end the server."""
    unreadable = os.open(tmp_path / "input", os.O_WRONLY | os.O_CREAT)
    command = [*GUARD, sys.executable, "-c", SERVER, str(tmp_path / "pid")]
    guard = subprocess.Popen(command, stdin=unreadable, stdout=subprocess.DEVNULL)
    os.close(unreadable)
    try:
        assert guard.wait(10) == -signal.SIGKILL
    finally:
        guard.kill()
        guard.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_it_ends_with_its_guard(tmp_path: Path, number: signal.Signals) -> None:
    with guarded(tmp_path) as (guard, server):
        guard.send_signal(number)
        assert is_gone(server)


def test_it_ends_when_its_owner_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *GUARD, sys.executable, "-c", SERVER, str(note)])
    try:
        server = noted(note)
    finally:
        owner.kill()
        owner.wait()
    assert is_gone(server)


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("raise SystemExit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
    ],
)
def test_a_server_that_ends_by_itself_gives_its_status(tmp_path: Path, program: str, status: int) -> None:
    server = GuardedServer(["-c", program], free_ports(1), log_path=tmp_path / "log")
    with (
        pytest.raises(ServerFailed, match=f"^the server exited with status {status}: its log is {tmp_path}/log$"),
        server,
    ):
        pytest.fail("it came up")


ANSWERS = """
import http.server, os, sys, tempfile

class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.getpid()} {tempfile.gettempdir()}".encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def test_it_is_ready_once_it_answers_and_its_scratch_goes_with_it(tmp_path: Path) -> None:
    port = free_ports(1)
    with GuardedServer(["-c", ANSWERS, str(port)], port, log_path=tmp_path / "log") as server:
        pid, scratch = server.request("/").decode().split()
        assert (int(pid), os.getpgid(server.pid)) == (server.pid, server.pid)
        assert Path(scratch).is_dir()
        server.require_running()
    assert is_gone(server.pid)
    assert not Path(scratch).exists()
    server.stop()
    with pytest.raises(ServerFailed, match="the server exited with status"):
        server.require_running()


def test_a_server_that_names_its_error_is_quoted(tmp_path: Path) -> None:
    server = GuardedServer(["-c", "1 / 0"], free_ports(1), log_path=tmp_path / "log")
    with pytest.raises(ServerFailed, match="status 1: ZeroDivisionError: division by zero; its log is"), server:
        pytest.fail("it came up")
