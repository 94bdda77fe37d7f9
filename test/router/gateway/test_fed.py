"""No error ends the feeding of the index: it is fed again by itself, and `/health` says so while it is not."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from marconi.router import subscriber as module
from marconi.router.gateway.app import ROUTER
from marconi.router.gateway.worker import Condition
from marconi.router.subscriber import Subscriber
from marconi.router.sync import Fleet

from .house import House, house, until
from .stand_in import StandIn

HEALTHY = (200, "")


class Broken:
    """A function that fails while it is broken, and counts how often."""

    def __init__(self, works: Callable[..., Any], error: Exception) -> None:
        self._works, self._error = works, error
        self.is_broken = False
        self.num_failures = 0

    def __get__(self, owner: Any, _: Any = None) -> Callable[..., Any]:
        return lambda *arguments, **options: self(owner, *arguments, **options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.is_broken:
            self.num_failures += 1
            raise self._error
        return self._works(*arguments, **options)


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def health(home: House) -> tuple[int, str]:
    answer = await home.get("/health")
    return answer.status, answer.message if answer.body else ""


async def until_healthy(home: House) -> None:
    await until(lambda: not home.gateway.feed.why_not_fed)
    assert await health(home) == HEALTHY


async def ask_some(home: House, first: int) -> None:
    for number in range(first, first + 6):
        assert (await home.ask(f"{number}: {'x' * 40}")).status == 200


@pytest.mark.parametrize("error", [ValueError("odd"), OSError(24, "too many files"), RuntimeError("no"), KeyError("w")])
def test_a_thread_that_cannot_read_events_connects_anew_and_misses_nothing(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poll = Broken(Subscriber.poll, error)
    monkeypatch.setattr(Subscriber, "poll", poll)
    monkeypatch.setattr(module, "_MAX_RETRY_S", 0.1)

    async def story() -> None:
        workers = StandIn("a"), StandIn("b")
        async with house(*workers, snapshot_period_s=0.2) as home:
            await ask_some(home, 0)
            await home.until_told(*workers)
            assert await health(home) == HEALTHY
            poll.is_broken = True
            await until(lambda: poll.num_failures > 2)
            assert await health(home) == (
                503, f"what workers hold is not known: workers' events cannot be read ({type(error).__name__})"
            )  # fmt: skip
            # Requests are still served; what they leave, no event tells.
            await ask_some(home, 10)
            poll.is_broken = False
            await until_healthy(home)
            await home.until_told(*workers)
            await ask_some(home, 20)
            await home.until_told(*workers)

    run(story())
    said = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert said == ["marconi: workers' events cannot be read; subscribing anew"], "once, however often it fails"


@pytest.mark.parametrize("method", ["receive", "work", "requests"])
def test_events_that_cannot_be_applied_are_read_anew(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step = Broken(getattr(Fleet, method), AssertionError("an index that cannot be"))
    monkeypatch.setattr(Fleet, method, step)

    async def story() -> None:
        workers = StandIn("a"), StandIn("b")
        async with house(*workers, snapshot_period_s=0.2) as home:
            await ask_some(home, 0)
            await home.until_told(*workers)
            step.is_broken = True
            await ask_some(home, 10)
            await until(lambda: step.num_failures > 1)
            assert await health(home) == (
                503, "what workers hold is not known: workers' events cannot be applied (AssertionError)"
            )  # fmt: skip
            step.is_broken = False
            await until_healthy(home)
            await home.until_told(*workers)
            await ask_some(home, 20)
            await home.until_told(*workers)

    run(story())
    said = [record.message for record in caplog.records if record.levelno >= logging.ERROR]
    assert said == ["marconi: workers' events cannot be applied; all is read anew"]


def test_a_thread_that_hangs_or_has_ended_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with house(StandIn("a")) as home:
            feed = home.gateway.feed
            monkeypatch.setattr(module, "_SILENT_S", -1.0)
            status, why = await health(home)
            assert status == 503
            assert why.startswith("what workers hold is not known: workers' events were last read ")
            monkeypatch.undo()
            assert await health(home) == HEALTHY
            feed.close()
            assert await health(home) == (
                503, "what workers hold is not known: the thread that reads workers' events has ended"
            )  # fmt: skip

    run(story())


def test_a_worker_is_checked_on_whatever_asking_for_its_load_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            checks, ask_load = home.app[ROUTER].checks, Broken(lambda _: asyncio.sleep(0), KeyError("a load"))
            monkeypatch.setattr(checks, "ask_load", ask_load)
            known = home.gateway.workers[worker.url]
            ask_load.is_broken = True
            await until(lambda: ask_load.num_failures > 1)
            ask_load.is_broken = False
            await until(lambda: known.health.condition is Condition.UP)
            await worker.kill()
            await until(lambda: known.health.condition is Condition.DOWN)

    run(story())
