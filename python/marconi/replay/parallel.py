"""Tasks in parallel, a process for each of some, results in the order of the tasks.

A worker is forked with what the tasks share (where the platform can fork), so a trace is never sent to it.
Workers report progress through a shared counter. They leave Ctrl-C to the parent, which ends them.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from typing import Any, TypeVar

from marconi.replay.outcome import Progress

SharedT = TypeVar("SharedT")
TaskT = TypeVar("TaskT")
ResultT = TypeVar("ResultT")

_POLL_S = 0.1


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(
    execute: Callable[[SharedT, TaskT, Progress], ResultT],
    shared: SharedT,
    tasks: Sequence[TaskT],
    num_processes: int,
    progress: Progress,
) -> list[ResultT]:
    """Execute `tasks`; what one raises is raised. `OSError` if a process ends before its time."""
    num_processes = min(num_processes, len(tasks))
    if num_processes <= 1:
        return [execute(shared, task, progress) for task in tasks]
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    num_done: Synchronized[int] = context.Value("Q", 0)
    pool = ProcessPoolExecutor(num_processes, context, _Worker.start, (execute, shared, num_done))
    try:
        futures = [pool.submit(_Worker.execute, task) for task in tasks]
        num_reported, pending = 0, set(futures)
        while pending:
            done, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            total = num_done.value
            progress(total - num_reported)
            num_reported = total
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise OSError("a replay process was ended from outside, perhaps for want of memory: try --jobs 1") from None
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """In a worker process: what every task shares, set once by the pool's initializer."""

    function: Callable[[Any, Any, Progress], Any]
    shared: Any
    num_done: "Synchronized[int]"

    @classmethod
    def start(cls, function: Callable[[Any, Any, Progress], Any], shared: Any, num_done: "Synchronized[int]") -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        cls.function, cls.shared, cls.num_done = staticmethod(function), shared, num_done

    @classmethod
    def execute(cls, task: Any) -> Any:
        return cls.function(cls.shared, task, cls._advance)

    @classmethod
    def _advance(cls, num_requests: int) -> None:
        with cls.num_done.get_lock():
            cls.num_done.value += num_requests
