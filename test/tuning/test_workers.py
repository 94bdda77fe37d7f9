"""Worker processes: the same scores, nothing waits for them, and they end."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from marconi.policy.eviction.base import Eviction
from marconi.tree.snapshot import take_snapshot
from marconi.tuning import InlineWorkers, ProcessWorkers, Schedule, TunableTree, Tuner, Window, pack_window

from . import traffic

VALUES = (0.0, 0.5, 2.0, 8.0, None)


@pytest.fixture(scope="module")
def window() -> Window:
    stream = traffic.documents_under_chatter(1, 400)
    live = traffic.new_cache()
    for request in stream[:200]:
        live.serve(request)
    return pack_window(take_snapshot(live.served.tree), stream[200:])


@pytest.fixture
def workers() -> Iterator[ProcessWorkers]:
    made = ProcessWorkers(2)
    yield made
    made.close()


@dataclass(frozen=True)
class Deadly:
    """A rule that ends its process, once."""

    flag: str

    def __call__(self, value: float) -> Eviction:
        try:
            os.close(os.open(self.flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return traffic.utility(value)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_processes_give_the_scores_that_the_caller_would_get(workers: ProcessWorkers, window: Window) -> None:
    futures = workers.submit(window, traffic.setup(), VALUES)
    assert len(futures) == 2
    found = dict(trial for future in futures for trial in future.result(timeout=120))
    (inline,) = InlineWorkers().submit(window, traffic.setup(), VALUES)
    assert found == dict(inline.result())
    assert set(found) == set(VALUES)


def test_a_tuner_with_processes_adopts_what_one_in_line_adopts(workers: ProcessWorkers) -> None:
    stream = traffic.documents_under_chatter(1, 1500)
    schedule = Schedule(grid=(0.0, 2.0, 32.0), min_requests=200, max_requests=200)
    values = []
    for runner in (InlineWorkers(), workers):
        cache = traffic.new_cache()
        tuner = Tuner(TunableTree(cache.served, lambda _: None), traffic.setup(), runner, schedule)
        for request in stream:
            cache.serve(request)
            tuner.observe(request)
            tuner.poll()
            # The next request comes when the trials are over, so that both decide at the same places.
            while not all(future.done() for future in tuner._running):
                time.sleep(0.01)
        tuner.poll()
        values.append(tuner.value)
    assert values[0] == values[1] > 0


def test_a_process_that_dies_costs_one_window(workers: ProcessWorkers, window: Window, tmp_path: object) -> None:
    setup = replace(traffic.setup(), eviction=Deadly(f"{tmp_path}/died"))
    with pytest.raises(Exception, match="terminated abruptly"):
        [future.result(timeout=120) for future in workers.submit(window, setup, VALUES)]
    found = dict(trial for future in workers.submit(window, setup, VALUES) for trial in future.result(timeout=120))
    assert set(found) == set(VALUES)


def test_closing_ends_the_processes(window: Window) -> None:
    workers = ProcessWorkers(2)
    workers.wait_until_ready()
    processes = list(workers._pool._processes.values())
    assert len(processes) == 2
    workers.submit(window, traffic.setup(), VALUES * 50)
    workers.close()
    assert not any(process.is_alive() for process in processes)


def test_at_least_one_process_is_needed() -> None:
    with pytest.raises(ValueError, match="worker processes must be 1 or more, got 0"):
        ProcessWorkers(0)
