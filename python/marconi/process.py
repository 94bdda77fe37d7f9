"""A server as a child process that never outlives the process that started it.

    this process --stdin--> guard: python -m marconi.process COMMAND... --> the server, in a session of its own

The guard ends as the server does. Its standard input is a pipe whose other end this process holds: when this process
ends, killed or not, or closes it, the server's whole session is killed (an HTTP server, its scheduler and detokenizer).
Where the guard itself is killed (Ray ends a worker's children so), the kernel signals the server, and SGLang's
processes follow their parent. A server keeps nothing that a gentler end would save, and its sockets in the file system
are in a scratch folder that is deleted with it. A Ctrl-C in the terminal reaches neither.

Ports are chosen at random among those that neither the kernel hands out (from 32768 on) nor Ray (10002 to 19999), since
a server binds them only once it has loaded its model. Owner: the caller that entered the context, or called `start`.
"""

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any, Final, Self

LOOPBACK: Final = "127.0.0.1"
LAUNCH: Final = ("-m", "sglang.launch_server")
_POLL_S: Final = 0.1
_STOP_S: Final = 10.0
_ERROR: Final = re.compile(r"marconi: error: |^\w[\w.]*(Error|Exception|Refusal): ")
_PORTS: Final = range(20_000, 30_000)
_TRIES: Final = 64
_CHANCE: Final = SystemRandom()
_PR_SET_PDEATHSIG: Final = 1


class NoAnswer(OSError):
    """A server that does not answer, or not as one of this project; the message is one line."""


class ServerFailed(RuntimeError):
    """A server that ended, never answered, or failed a request; one line with the reason and the log's path."""


class GuardedServer:
    """`python ARGUMENTS`, ready when the context is entered; `ServerFailed` where it never is.

    It prints to `log_path`, or without one where this process prints. `env` is added to this process's environment.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        port: int,
        *,
        log_path: Path | None = None,
        env: Mapping[str, str] | None = None,
        ready_timeout_s: float = 600.0,
    ) -> None:
        self.port = port
        self._log = log_path
        self._command = (sys.executable, *arguments)
        self._env = environment(env)
        self._ready_timeout_s = ready_timeout_s
        self._guard: subprocess.Popen[bytes] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._pid: int | None = None

    @property
    def url(self) -> str:
        """The server's base URL, without a slash at the end."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the HTTP server, which leads a session of its own."""
        assert self._pid is not None, "not started"
        return self._pid

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server, and return at once."""
        # Short, because the path of a socket may have 107 characters.
        self._scratch = tempfile.TemporaryDirectory(prefix="marconi-server-")
        reads, writes = os.pipe()
        try:
            with contextlib.nullcontext() if self._log is None else self._log.open("wb") as log:
                self._guard = subprocess.Popen(  # noqa: S603 - our own interpreter and our caller's command
                    [sys.executable, "-m", "marconi.process", str(writes), *self._command],
                    env={**self._env, "TMPDIR": self._scratch.name},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=None if log is None else subprocess.STDOUT,
                    pass_fds=(writes,),
                    start_new_session=True,
                )
        finally:
            os.close(writes)
            with os.fdopen(reads) as pid:
                self._pid = int(pid.readline() or 0) or None

    def wait_until_ready(self) -> None:
        """Return once the server is ready; `ServerFailed` where it ends before or takes too long."""
        give_up_s = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < give_up_s:
            self.require_running()
            if self.is_ready():
                return
            time.sleep(_POLL_S)
        raise ServerFailed(f"the server was not ready after {self._ready_timeout_s:g} s{self.reason()}")

    def require_running(self) -> None:
        """Raise `ServerFailed` if the server has ended."""
        status = None if self._guard is None else self._guard.poll()
        if self._guard is None or status is not None:
            raise ServerFailed(f"the server exited with status {status}{self.reason()}")

    def is_ready(self) -> bool:
        """True if the server answers its health check."""
        try:
            self.request("/health")
        except OSError:
            return False
        return True

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """GET a path, or POST a JSON body to it; `OSError` where there is no answer, or an error."""
        return fetch(f"{self.url}{path}", body, has_proxy=False)

    def reason(self) -> str:
        """The log's last line that names an error, else its last line, and its path; begins with a colon."""
        if self._log is None:
            return ": its log is above"
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in reversed(text.splitlines()) if line.strip()]
        last = next((line for line in lines if _ERROR.search(line)), lines[0] if lines else "").strip()
        return f": {last + '; ' if last else ''}its log is {self._log}"

    def stop(self) -> None:
        """Kill all processes of the server, and wait until they have ended. Safe to call twice."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            try:
                self._guard.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._guard.kill()
                self._guard.wait()
        if self._scratch is not None:
            self._scratch.cleanup()


def fetch(
    url: str, body: Any = None, *, api_key: str | None = None, timeout_s: float = 10.0, has_proxy: bool = True
) -> bytes:
    """GET an HTTP URL, or POST a JSON body to it; `HTTPError` where the answer is an error, `NoAnswer` without one."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - callers check it
    if api_key is not None:
        request.add_header("Authorization", f"Bearer {api_key}")
    opener = urllib.request.build_opener(*(() if has_proxy else (urllib.request.ProxyHandler({}),)))
    try:
        with opener.open(request, timeout=timeout_s) as response:
            content: bytes = response.read()
    except urllib.error.HTTPError:
        raise
    except OSError as error:
        raise NoAnswer(f"{url} does not answer: {getattr(error, 'reason', error)}") from None
    except http.client.HTTPException as error:
        raise NoAnswer(f"{url} does not answer in HTTP: it is no server of this project ({error!r})") from None
    return content


def from_json(url: str, content: bytes) -> Any:
    """The JSON that `url` has answered; `NoAnswer` for other content."""
    try:
        return json.loads(content)
    except ValueError:
        raise NoAnswer(f"{url} does not answer in JSON: it is no server of this project") from None


def environment(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server or of its client: ours, without a proxy to the loopback device."""
    env = {**os.environ, **(overrides or {})}
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, (env.get(name), LOOPBACK)))
    return env


def free_ports(number: int, host: str = LOOPBACK) -> int:
    """The first of `number` free TCP ports in a row; `OSError` where there are none."""
    for _ in range(_TRIES):
        port = _CHANCE.choice(_PORTS)
        if all(_is_free(host, port + offset) for offset in range(number)):
            return port
    raise OSError(f"{host}: no {number} TCP ports in a row are free, of {_PORTS.start} to {_PORTS.stop - 1}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


# The guard


def guard(command: Sequence[str], pid_fd: int) -> int:
    """Run a command until it ends or standard input does, which kills it; writes its process id to a descriptor."""
    # The thread that starts it must be the one that stays: the kernel signals the death of a thread.
    server = subprocess.Popen(  # noqa: S603 - our owner's command, no shell
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_dies_with_parent if sys.platform == "linux" else None,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _kill(server.pid))
    threading.Thread(target=_watch, args=(server.pid,), daemon=True).start()
    with os.fdopen(pid_fd, "w") as owner:
        owner.write(f"{server.pid}\n")
    try:
        return server.wait()
    finally:
        _kill(server.pid)


def _watch(group: int) -> None:
    # An error is an end, too: nobody else would kill the server with its owner.
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 4096):
            pass
    _kill(group)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _dies_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    status = guard(sys.argv[2:], int(sys.argv[1]))
    if status < 0:
        # End by the same signal as the server.
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
