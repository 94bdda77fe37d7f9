"""SGLang's server without the half minute that each of its processes spends importing: all are forks of one that has.

    a test's worker --> guard --> client: preloaded.py SOCKET ENTRY_POINT ARGUMENTS...
          |                         |  descriptors, environment, arguments; answered with the exit status
    preloaded.py SOCKET  --fork--> keeper --fork--> the server  --fork--> its schedulers, its detokenizer

A server gets the client's environment, descriptors, signals and working folder, and leads a session of its own, which
the keeper kills when the client ends. Schedulers are forks of the server rather than spawned: what a script registers
they have already. Tests of how a server starts and ends use real ones (`ServerProcess`).
"""

import gc
import json
import multiprocessing
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NoReturn

from marconi_cpu.demo.server_process import environment

PASSED_ON = (signal.SIGINT, signal.SIGTERM)
_MAX_MESSAGE_BYTES = 1 << 20
DISABLED_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"
_MODELS = ("qwen3", "nemotron_h", "llama.py", "lfm2.", "inkling")
"""Files of SGLang's models that tests serve, by how they begin; it imports all, which takes longer than all else."""


@contextmanager
def preloaded(folder: Path) -> Iterator[tuple[str, ...]]:
    """The start of an entry point: before a script, or before `-m` and a module. Ready when the context is entered."""
    path = folder / "socket"
    # Read when OpenMP is loaded. Two servers are asked at a time, on as many cores as both would compute on.
    env = environment() | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, __file__, str(path)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline(), "it ended before it was ready: its reason is above"
        try:
            yield __file__, str(path)
        finally:
            process.stdin.close()
            process.wait()


def ask(path: str, arguments: Sequence[str]) -> int:
    """Start a server and return its exit status."""
    message = {"arguments": arguments, "env": dict(os.environ), "folder": str(Path.cwd())}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(path)
        socket.send_fds(client, [json.dumps(message).encode()], [1, 2])
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: client.send(str(number).encode()))
        return int(client.recv(16) or -signal.SIGKILL)


def serve(path: str) -> None:
    """Fork a keeper for each client, until standard input ends."""
    # What a scheduler has before it loads plugins, no more: the models come after their hooks.
    import setproctitle
    import sglang.launch_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import hook_registry

    # It finds the room for a title beside the environment as the process began, which a fork replaces: schedulers are
    # known by their titles when a server ends.
    setproctitle.getproctitle()
    hook_registry._propagate_patch = Bindings().replace
    # It sleeps for a second before each of so many looks whether it answers. Each fork begins with the short ones.
    waits_s = chain(repeat(0.05, 20), repeat(1.0))
    http_server.time = SimpleNamespace(**vars(time) | {"sleep": lambda _: time.sleep(next(waits_s))})
    # A server collects garbage as it starts, and would go through all of this each time.
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([listener, 0], [], [])[0]:
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    listener.close()
                    keep(client)


class Bindings:
    """Where modules have a value by a name of theirs: SGLang looks through all of them for each hook."""

    def __init__(self) -> None:
        self._num_modules = 0
        self._num_names: dict[str, int] = {}
        self._places: dict[int, set[tuple[str, str]]] = {}
        self._learn()

    def replace(self, original: object, wrapped: object, source: ModuleType) -> int:
        """As `_propagate_patch`: in all modules but `source`; returns in how many places."""
        self._learn()
        places = {
            (key, name)
            for key, name in self._places.get(id(original), ())
            if key in sys.modules and sys.modules[key] is not source and vars(sys.modules[key]).get(name) is original
        }
        for key, name in places:
            setattr(sys.modules[key], name, wrapped)
        # They may be hooked again.
        self._places.setdefault(id(wrapped), set()).update(places)
        return len(places)

    def _learn(self) -> None:
        """What modules have got since; they get names as they are imported."""
        if len(sys.modules) == self._num_modules:
            return
        self._num_modules = len(sys.modules)
        for key, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and self._num_names.get(key) != len(vars(module)):
                self._num_names[key] = len(vars(module))
                for name, value in list(vars(module).items()):
                    self._places.setdefault(id(value), set()).add((key, name))


def disabled_models() -> str:
    """The models that no test serves."""
    import sglang

    paths = Path(sglang.__path__[0], "srt", "models").glob("*.py")
    return ",".join(path.stem for path in paths if not path.name.startswith(_MODELS))


def keep(client: socket.socket) -> NoReturn:
    """Run a client's server until either ends.

    What ends a test's process group, a time limit or Ctrl-C, is not to end who stops the server.
    """
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, descriptors, _, _ = socket.recv_fds(client, _MAX_MESSAGE_BYTES, 2)
    server = os.fork()
    if server == 0:
        client.close()
        os.setsid()
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), *descriptors)):
            os.dup2(descriptor, number)
        run(**json.loads(message))
    ended = os.pidfd_open(server)
    while ended not in select.select([client, ended], [], [])[0]:
        number = client.recv(16)
        with suppress(ProcessLookupError):
            if number:
                os.kill(server, int(number))
            else:
                os.killpg(server, signal.SIGKILL)
                break
    _, status = os.waitpid(server, 0)
    with suppress(OSError):
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def run(arguments: list[str], env: dict[str, str], folder: str) -> NoReturn:
    """Be the process that `python ARGUMENTS` would have been."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    os.environ[DISABLED_MODELS] = disabled_models()
    multiprocessing.set_start_method("fork", force=True)
    # SGLang asks for processes that import everything once more.
    multiprocessing.set_start_method = lambda *_args, **_options: None  # type: ignore[assignment]
    status: object = 1
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        if isinstance(status, str):
            print(status, file=sys.stderr, flush=True)
        os._exit(status if isinstance(status, int) else int(status is not None))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        serve(sys.argv[1])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
