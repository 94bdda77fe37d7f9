"""Does the replays of figures, each once, in processes.

A job is some cells of one scene: its process draws the trace once for all of them, so nothing large is sent there.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from marconi.replay.outcome import Progress
from marconi.replay.parallel import run_all

from .cells import Cell, Sample, Scene

_CELLS_A_JOB: Final = 8


def measure(
    cells: Iterable[Cell], num_processes: int, progress: Callable[[int], None] | None = None
) -> dict[Cell, Sample]:
    """A sample of each of `cells`; `progress` receives how many more are done.

    What a replay raises is raised. `OSError` if a process ends before its time.
    """
    jobs = _jobs(cells)
    found = run_all(_work, None, jobs, num_processes, progress or (lambda num_done: None))
    return {
        cell: sample
        for job, samples in zip(jobs, found, strict=True)
        for cell, sample in zip(job, samples, strict=True)
    }


def _jobs(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Every cell once, in jobs of one scene."""
    of_scene: dict[Scene, dict[Cell, None]] = {}
    for cell in cells:
        of_scene.setdefault(cell.scene, {})[cell] = None
    jobs = []
    for members in map(list, of_scene.values()):
        jobs += [members[start : start + _CELLS_A_JOB] for start in range(0, len(members), _CELLS_A_JOB)]
    return jobs


def _work(inputs: None, job: Sequence[Cell], progress: Progress) -> list[Sample]:
    trace = job[0].scene.trace()
    samples = []
    for cell in job:
        samples.append(cell.sample(trace))
        progress(1)
    return samples
