"""Where trials run: in processes of their own beside the serving process, or in line for replays and tests.

Processes are spawned, not forked (a serving process has threads and perhaps an accelerator's context), run at the
lowest priority, look between two trials whether they should stop, and end by themselves when their parent is gone.
"""

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from typing import Protocol

from marconi.tuning.trial import Setup, Trial, run_trials
from marconi.tuning.window import Window

_NICENESS = 10

_stop: Event | None = None
"""In a worker process: whether the pool is being closed. Set once, by the pool's initializer."""


class Workers(Protocol):
    """Runs trials. Futures may be done, running or broken; `submit` does not wait for them."""

    def submit(self, window: Window, setup: Setup, values: Sequence[float | None]) -> list[Future[list[Trial]]]:
        """Start a trial of each value, None being the reference; together the futures hold all of them."""
        ...

    def close(self) -> None:
        """End whatever runs."""
        ...


class InlineWorkers:
    """Runs trials at once in the caller: the same requests give the same decisions at the same places."""

    def submit(self, window: Window, setup: Setup, values: Sequence[float | None]) -> list[Future[list[Trial]]]:
        """One future, done."""
        future: Future[list[Trial]] = Future()
        try:
            future.set_result(run_trials(window, setup, values))
        except Exception as error:  # a broken rule must not end the caller, as it would not in a process
            future.set_exception(error)
        return [future]

    def close(self) -> None:
        """Nothing runs."""


class ProcessWorkers:
    """Runs trials in `num_processes` processes, which start with this object and end with `close`.

    The module that the program was started from must be importable without side effects, as for any spawned process.
    """

    def __init__(self, num_processes: int = 2) -> None:
        """`ValueError` for less than one process."""
        if num_processes < 1:
            raise ValueError(f"worker processes must be 1 or more, got {num_processes}")
        self.num_processes = num_processes
        context = multiprocessing.get_context("spawn")
        self._context = context
        self._stop = context.Event()
        self._pool = self._start()

    def submit(self, window: Window, setup: Setup, values: Sequence[float | None]) -> list[Future[list[Trial]]]:
        """One future a process; the window is sent to each of them once."""
        shares = [share for index in range(self.num_processes) if (share := values[index :: self.num_processes])]
        try:
            return [self._pool.submit(_work, window, setup, share) for share in shares]
        except BrokenProcessPool:
            self._pool.shutdown(wait=False)
            self._pool = self._start()
            return [self._pool.submit(_work, window, setup, share) for share in shares]

    def wait_until_ready(self) -> None:
        """Wait until every process has started; for measurements."""
        for future in self._ready:
            future.result()

    def close(self) -> None:
        """End the processes, at the latest when their present trials are done."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _start(self) -> ProcessPoolExecutor:
        pool = ProcessPoolExecutor(self.num_processes, self._context, _initialize, (self._stop,))
        # A process is started for each task that finds none idle, and none is idle yet.
        self._ready = [pool.submit(os.getpid) for _ in range(self.num_processes)]
        return pool


def _initialize(stop: Event) -> None:
    global _stop
    _stop = stop
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(window: Window, setup: Setup, values: Sequence[float | None]) -> list[Trial]:
    trials: list[Trial] = []
    for value in values:
        if _stop is not None and _stop.is_set():
            raise CancelledError
        trials += run_trials(window, setup, [value])
    return trials
