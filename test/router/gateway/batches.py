"""Many schedules: in batches, each in a process of its own, as many processes at once as there are cores.

A process ends with its batch because aiohttp remembers the handlers of every application that it ever served, and with
them the application, its routers and workers: in one process each schedule is slower than the one before it. Processes
are spawned; a fork would share its parent's event loop and ZeroMQ contexts.

Each seed runs exactly once, whatever becomes of the others. A failure comes back as text: not every exception can be
sent from one process to another, and no traceback can.
"""

import asyncio
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from marconi.replay.parallel import num_usable_cores

BATCH = 40
AT_ONCE = 4
"""Schedules of a batch that run together."""

Run = Callable[[int], Coroutine[Any, Any, Counter[str]]]
"""A schedule, by its seed: how its requests ended; an exception where something does not hold."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of a batch."""

    seeds: range
    ended: Counter[str]
    """How its requests ended, of the schedules in which all held."""
    failures: tuple[str, ...]
    """The seed and the traceback of every other."""
    seconds: float

    def __str__(self) -> str:
        said = f"schedules {self.seeds[0]} to {self.seeds[-1]}: {self.seconds:.1f} s"
        return f"{said}, {len(self.failures)} FAILED" if self.failures else said


def run_all(num_schedules: int, run: Run, batch: int = BATCH) -> Counter[str]:
    """How the requests of all schedules ended; `AssertionError` that names those that failed, and shows why.

    One batch runs in this process; `run` is of a module, so that another process finds it.
    """
    ended: Counter[str] = Counter()
    failures: list[str] = []
    for outcome in _outcomes([range(num_schedules)[first:][:batch] for first in range(0, num_schedules, batch)], run):
        print(outcome, flush=True)
        ended.update(outcome.ended)
        failures.extend(outcome.failures)
    assert not failures, f"{len(failures)} of {num_schedules} schedules failed\n" + "\n".join(failures)
    return ended


def run_batch(seeds: range, run: Run) -> Outcome:
    """In this process."""
    started_s = time.monotonic()
    waiting = iter(seeds)
    ended: Counter[str] = Counter()
    failures: list[str] = []

    async def some() -> None:
        for seed in waiting:
            try:
                ended.update(await run(seed))
            except Exception:
                failures.append(f"schedule {seed}:\n{traceback.format_exc()}")

    async def all_of_them() -> None:
        await asyncio.gather(*(some() for _ in range(AT_ONCE)))

    asyncio.run(all_of_them())
    return Outcome(seeds, ended, tuple(failures), time.monotonic() - started_s)


def _outcomes(batches: list[range], run: Run) -> Iterator[Outcome]:
    """As the batches end."""
    if len(batches) == 1:
        yield run_batch(batches[0], run)
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_usable_cores(), mp_context=spawn, max_tasks_per_child=1)
    try:
        futures: dict[Future[Outcome], range] = {pool.submit(run_batch, seeds, run): seeds for seeds in batches}
        for done in as_completed(futures):
            try:
                outcome = done.result()
            except BaseException as failure:
                failure.add_note(f"schedules {futures[done][0]} to {futures[done][-1]}")
                raise
            yield outcome
    finally:
        pool.shutdown(cancel_futures=True)
