"""A server that never outlives its replica, however that ends.

    python -m marconi.router.ray_serve.guard COMMAND...

runs a command in a session of its own and ends with its status. Standard input is a pipe whose other end the replica
holds: it ends when the replica does, killed or not, and then the whole session is killed. Where this process itself is
killed (Ray ends a worker's children so) the kernel tells the command, and SGLang's processes follow their parent.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def run(command: Sequence[str]) -> int:
    """The exit status of a command that is killed when standard input ends."""
    # The thread that starts it must be the one that stays: its death is what the kernel tells of.
    server = subprocess.Popen(  # noqa: S603 - what our replica asks for, no shell
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_dies_with_parent if sys.platform == "linux" else None,
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: _kill(server.pid))
    threading.Thread(target=_watch, args=(server.pid,), daemon=True).start()
    try:
        return server.wait()
    finally:
        _kill(server.pid)


def _watch(group: int) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _kill(group)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _dies_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    status = run(sys.argv[1:])
    sys.exit(status if status >= 0 else 128 - status)
