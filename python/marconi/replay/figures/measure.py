"""Does the replays of figures, each once, in processes.

A job is some cells of one scene: its process draws the trace once for all of them, so nothing large is sent there.
Workers leave Ctrl-C to the parent, which ends them.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Final

from marconi.replay.figures.cells import Cell, Sample, Scene

_CELLS_A_JOB: Final = 8


def measure(
    cells: Iterable[Cell], num_processes: int, progress: Callable[[int], None] | None = None
) -> dict[Cell, Sample]:
    """A sample of each of `cells`; `progress` is told of so many further ones done.

    What a replay raises is raised. `OSError` if a process ends before its time.
    """
    jobs = _jobs(cells)
    tell = progress or (lambda num_done: None)
    samples: dict[Cell, Sample] = {}
    if num_processes <= 1 or len(jobs) <= 1:
        for job in jobs:
            samples.update(zip(job, _work(job), strict=True))
            tell(len(job))
        return samples
    others = set(multiprocessing.active_children())
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    pool = ProcessPoolExecutor(min(num_processes, len(jobs)), context, _leave_signals)
    try:
        job_of = {pool.submit(_work, job): job for job in jobs}
        for future in as_completed(job_of):
            samples.update(zip(job_of[future], future.result(), strict=True))
            tell(len(job_of[future]))
        return samples
    except BrokenProcessPool:
        raise OSError("a replay process was ended from outside, perhaps for want of memory: try --jobs 1") from None
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _jobs(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Every cell once, in jobs of one scene."""
    of_scene: dict[Scene, dict[Cell, None]] = {}
    for cell in cells:
        of_scene.setdefault(cell.scene, {})[cell] = None
    jobs = []
    for members in map(list, of_scene.values()):
        jobs += [members[start : start + _CELLS_A_JOB] for start in range(0, len(members), _CELLS_A_JOB)]
    return jobs


def _work(job: Sequence[Cell]) -> list[Sample]:
    trace = job[0].scene.trace()
    return [cell.sample(trace) for cell in job]


def _leave_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
