"""Under random schedules of faults no answer is wrong, no request is lost, and the index is what the workers hold.

`MARCONI_SCHEDULES` says how many schedules there are; `make soak-fleet` runs 1,000.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from marconi.router.gateway.gateway import Gateway

from .batches import run_all, run_batch
from .house import knows, routed, until
from .schedules import Schedule, run_schedule
from .stand_in import StandIn, living

NUM_SCHEDULES = int(os.environ.get("MARCONI_SCHEDULES", "12"))


def test_random_schedules_lose_nothing_and_the_index_converges() -> None:
    ended = run_all(NUM_SCHEDULES, run_schedule)
    print(dict(ended))
    assert ended.total() == NUM_SCHEDULES * Schedule(0).num_requests
    assert min(ended[each] for each in ("whole", "stream", "gone")) > 0
    assert ended["broken"] < ended["stream"] / 4
    # How many meet two deaths is the machine's speed: the slower it is, the longer each request runs.
    assert ended["lost twice"] < ended.total() / 5


def test_each_schedule_runs_once_and_one_that_fails_is_named_with_its_traceback_from_its_process(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ended = run_all(3, numbered, batch=2)
    assert [ended.pop(f"schedule {seed}") for seed in range(3)] == [1, 1, 1]
    assert sorted(ended.values()) == [1, 2], "a batch, a process"
    assert f"process {os.getpid()}" not in ended
    assert sorted(line.partition(":")[0] for line in capsys.readouterr().out.splitlines()) == [
        "schedules 0 to 1",
        "schedules 2 to 2",
    ]
    with pytest.raises(AssertionError, match=r"(?s)^1 of 3 schedules failed\nschedule 1:.*in stumbling.*one is wrong$"):
        run_all(3, stumbling, batch=2)


def test_one_that_fails_stops_none_of_its_batch() -> None:
    outcome = run_batch(range(4), stumbling)
    assert outcome.ended == Counter({"schedule 0": 1, "schedule 2": 1, "schedule 3": 1, f"process {os.getpid()}": 3})
    assert len(outcome.failures) == 1
    assert str(outcome).startswith("schedules 0 to 3: ")
    assert str(outcome).endswith(", 1 FAILED")


def test_the_schedules_would_see_a_request_that_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = Gateway.dispatch
    monkeypatch.setattr(
        Gateway, "dispatch", lambda self, prompt, tried: None if tried else dispatch(self, prompt, tried)
    )
    with pytest.raises(AssertionError, match=r"50[23]"):
        for_each_of(4, run_schedule)


def test_the_schedules_would_see_an_index_that_does_not_converge() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with living(worker), routed(worker, snapshot_period_s=3600.0) as home:
            await until(lambda: home.gateway.dispatcher.fleet.stats.num_snapshots == 1)
            stats = home.gateway.dispatcher.fleet.stats
            assert worker.publisher is not None
            worker.publisher._pub = Deaf()
            await home.ask("x" * 40)
            await until(lambda: not worker.holding.num_waiting)
            with pytest.raises(AssertionError, match="never came to be"):
                await until(lambda: knows(home.gateway, worker), 1.0)
            assert stats.num_gaps == 0, "nobody could know"

    asyncio.run(story())


class Deaf:
    """A socket that sends nothing."""

    def send_multipart(self, _: object) -> None:
        """Lose it."""


async def numbered(seed: int) -> Counter[str]:
    return Counter([f"schedule {seed}", f"process {os.getpid()}"])


async def stumbling(seed: int) -> Counter[str]:
    if seed == 1:
        raise CannotBeSent(seed, "one is wrong")
    return await numbered(seed)


class CannotBeSent(Exception):
    """One that no other process can make anew from what it says."""

    def __init__(self, seed: int, message: str) -> None:
        super().__init__(message)


def for_each_of(number: int, run: Callable[[int], Coroutine[Any, Any, object]]) -> None:
    for seed in range(number):
        asyncio.run(run(seed))
