"""An SGLang server as a child process: started on a free loopback port, waited for, and always stopped.

The child leads a session of its own, so a Ctrl-C in the terminal reaches only us, and stopping it means killing
that session's process group: the HTTP server, the scheduler and the detokenizer. It keeps nothing that a gentler end
would save, and its sockets in the file system lie in a scratch folder that goes with it. Owner: whoever entered the
context.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

_POLL_S = 0.25
_ERROR = re.compile(r"marconi: error: |^\w[\w.]*(Error|Exception|Refusal): ")
_ENTRY_POINT = ("-m", "sglang.launch_server")


class ServerFailed(RuntimeError):
    """A server ended, never answered, or failed a request; one line that says why and where its log is."""


def free_port() -> int:
    """A loopback TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def has_accelerator() -> bool:
    """Whether torch finds a device that SGLang serves on without this project's CPU platform."""
    import torch

    return torch.accelerator.is_available()


def environment(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server or of its client: ours, never a proxy on the way to the loopback device.

    Where there is no accelerator and no platform was chosen, it chooses the CPU platform.
    """
    env = {**os.environ, **(overrides or {})}
    for name in ("NO_PROXY", "no_proxy"):
        env[name] = ",".join(filter(None, (env.get(name), "127.0.0.1")))
    if "SGLANG_PLATFORM" not in env and not has_accelerator():
        env["SGLANG_PLATFORM"] = "marconi_cpu"
    return env


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder for logs and models that goes when the block ends, unless a server failed: the error names its log."""
    path = Path(tempfile.mkdtemp(prefix="marconi-"))
    try:
        yield path
    except ServerFailed:
        raise
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise
    else:
        shutil.rmtree(path, ignore_errors=True)


class ServerProcess:
    """`python ENTRY_POINT --model-path MODEL --port FREE ARGS`, ready when the context is entered.

    `log_path` gets what it prints; `entry_point` replaces `-m sglang.launch_server`. Raises `ServerFailed`.
    """

    def __init__(
        self,
        model_path: str | Path,
        args: Sequence[str],
        *,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        entry_point: Sequence[str] = _ENTRY_POINT,
        ready_timeout_s: float = 600.0,
    ):
        self.model_path = str(model_path)
        self.log_path = log_path
        self.port = free_port()
        self._command = [
            *(sys.executable, *entry_point, "--model-path", self.model_path),
            *("--host", "127.0.0.1", "--port", str(self.port), *args),
        ]
        self._env = environment(env)
        self._ready_timeout_s = ready_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's base URL, without a slash at the end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id of the HTTP server, which leads the group."""
        assert self._process is not None, "not started"
        return self._process.pid

    def __enter__(self) -> "ServerProcess":
        # Short, because the path of a socket may have 107 characters.
        self._scratch = tempfile.TemporaryDirectory(prefix="marconi-server-")
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and arguments, no shell
                    self._command,
                    env={**self._env, "TMPDIR": self._scratch.name},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._wait_until_ready(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill every process of the server, and wait for the one that leads them. Safe to call twice."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        self._scratch.cleanup()

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]") -> None:
        deadline_s = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < deadline_s:
            if process.poll() is not None:
                raise ServerFailed(f"the server exited with status {process.returncode}{self.reason()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == httpx.codes.OK:
                    return
            time.sleep(_POLL_S)
        raise ServerFailed(f"the server was not ready after {self._ready_timeout_s:.0f} s{self.reason()}")

    def reason(self) -> str:
        """The last line of the log that names an error, if one does, and where the log is; begins with a colon."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        named = next((line.strip() for line in reversed(lines) if _ERROR.search(line)), "")
        return f": {named + '; ' if named else ''}its log is {self.log_path}"
