"""An SGLang server as a child process (`marconi.process`) on a machine with or without an accelerator."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from marconi import process
from marconi.engine.cpu_platform import choose_platform
from marconi.process import LAUNCH, LOOPBACK, GuardedServer, ServerFailed, free_ports

__all__ = ["ServerFailed", "ServerProcess", "environment", "scratch_folder"]


class ServerProcess(GuardedServer):
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
        entry_point: Sequence[str] = LAUNCH,
        ready_timeout_s: float = 600.0,
    ):
        self.model_path = str(model_path)
        self.log_path = log_path
        port = free_ports(1)
        super().__init__(
            [*entry_point, "--model-path", self.model_path, "--host", LOOPBACK, "--port", str(port), *args],
            port,
            log_path=log_path,
            env=environment(env),
            ready_timeout_s=ready_timeout_s,
        )


def environment(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server or of its client: ours, never a proxy on the way to the loopback device."""
    env = process.environment(overrides)
    choose_platform(env)
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
