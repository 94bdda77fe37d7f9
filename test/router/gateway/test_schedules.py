"""Under random schedules of faults no answer is wrong, no request is lost, and the index is what the workers hold.

`MARCONI_SCHEDULES` says how many schedules there are; `make soak-fleet` runs 1,000.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from marconi.router.gateway.brain import Brain

from .house import knows, routed, until
from .schedules import Schedule, run_schedule
from .stand_in import StandIn, living

NUM_SCHEDULES = int(os.environ.get("MARCONI_SCHEDULES", "12"))
AT_ONCE = 4


def test_random_schedules_lose_nothing_and_the_index_converges() -> None:
    async def all_of_them() -> Counter[str]:
        seeds = iter(range(NUM_SCHEDULES))
        ended: Counter[str] = Counter()

        async def some() -> None:
            for seed in seeds:
                try:
                    ended.update(await run_schedule(seed))
                except BaseException as failure:
                    failure.add_note(f"schedule {seed}")
                    raise

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(some())
        return ended

    ended = asyncio.run(all_of_them())
    print(dict(ended))
    assert ended.total() == NUM_SCHEDULES * Schedule(0).num_requests
    assert min(ended[each] for each in ("whole", "stream", "gone")) > 0
    assert ended["broken"] < ended["stream"] / 4


def test_the_schedules_would_see_a_request_that_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch = Brain.dispatch
    monkeypatch.setattr(Brain, "dispatch", lambda self, prompt, tried: None if tried else dispatch(self, prompt, tried))
    with pytest.raises(AssertionError, match=r"50[23]"):
        for_each_of(4, run_schedule)


def test_the_schedules_would_see_an_index_that_does_not_converge() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with living(worker), routed(worker, snapshot_period_s=3600.0) as home:
            counters = home.brain.dispatcher.fleet.counters
            await until(lambda: home.brain.dispatcher.fleet.counters.num_snapshots == 1)
            assert worker.publisher is not None
            worker.publisher._pub = Deaf()
            await home.ask("x" * 40)
            await until(lambda: not worker.holding.num_waiting)
            with pytest.raises(AssertionError, match="never came to be"):
                await until(lambda: knows(home.brain, worker), 1.0)
            assert counters.num_gaps == 0, "nobody could know"

    asyncio.run(story())


class Deaf:
    """A socket that sends nothing."""

    def send_multipart(self, _: object) -> None:
        """Lose it."""


def for_each_of(number: int, run: Callable[[int], Coroutine[Any, Any, object]]) -> None:
    for seed in range(number):
        asyncio.run(run(seed))
