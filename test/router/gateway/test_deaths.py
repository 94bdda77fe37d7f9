"""A request that workers die of ends two of them at most; one that only met bad luck is answered."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from marconi.router.gateway.settings import HealthLimits

from .house import house, until
from .stand_in import Fault, StandIn

SLOW_TO_SEE = HealthLimits(max_failures=100, period_s=3600.0, first_retry_s=3600.0, timeout_s=10.0)


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def workers(number: int) -> list[StandIn]:
    return [StandIn(f"w{each}") for each in range(number)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_workers_die_of_ends_two_of_them_at_most(stream: bool) -> None:
    async def story() -> None:
        fleet = workers(5)
        async with house(*fleet, max_attempts=5) as home:
            for worker in fleet:
                worker.fault = Fault.BREAKS
            answer = await home.ask("a poison", stream=stream)
            assert (answer.status, answer.json["error"]["type"]) == (502, "server_error")
            assert answer.message == "2 workers failed while they had this request: no other gets it"
            assert answer.headers["x-should-retry"] == "false", "OpenAI's clients would send it again"
            assert sum(len(worker.asked) for worker in fleet) == 2
            home.gateway.dispatcher.check_invariants()
            assert not any(home.gateway.dispatcher.num_running(worker.url) for worker in fleet)

    run(story())


def test_each_such_request_costs_two_workers_and_others_are_answered_all_the_same() -> None:
    class Dies(StandIn):
        async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if body.get("kills"):
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(3600)
            return await super()._answer(request, body)

    async def story() -> None:
        fleet = [Dies(f"w{each}") for each in range(4)]
        async with house(*fleet, max_attempts=10) as home:
            for number in range(4):
                assert (await home.ask(f"{number}", kills=True)).status == 502
            assert sum(len(worker.asked) for worker in fleet) == 8
            assert (await home.ask("hello")).status == 200

    run(story())


def test_a_request_that_hangs_workers_until_they_are_down_ends_two_of_them_at_most() -> None:
    async def story() -> None:
        fleet = workers(4)
        async with house(*fleet, max_attempts=10) as home:
            for worker in fleet:
                worker.fault = Fault.HANGS
            asking = asyncio.create_task(home.ask("hello"))
            for number in (1, 2):
                await until(lambda number=number: sum(len(worker.asked) for worker in fleet) == number)  # type: ignore[misc]
                next(worker for worker in fleet if worker.asked and worker.is_healthy).is_healthy = False
            assert (await asking).message.startswith("2 workers failed ")
            assert sum(len(worker.asked) for worker in fleet) == 2

    run(story())


def test_workers_that_were_gone_before_anything_was_sent_are_no_deaths() -> None:
    async def story() -> None:
        gone = workers(4)
        async with house(*gone, health=SLOW_TO_SEE, max_attempts=5) as home:
            for worker in gone:
                await worker.kill()
            answer = await home.ask("hello")
            assert (answer.status, answer.message) == (503, "no worker is up")
            assert len((await home.state())["recent"][0]["failures"]) == 4, "each was tried"

    run(story())


def test_one_death_among_workers_that_turn_away_and_workers_that_are_gone_is_borne() -> None:
    async def story() -> None:
        dying, *full, gone, good = workers(5)
        async with house(dying, *full, gone, good, health=SLOW_TO_SEE, max_attempts=5) as home:
            dying.fault = Fault.BREAKS
            for worker in full:
                worker.fault = Fault.REFUSES
            await gone.kill()
            for number in range(100):
                assert (await home.ask(f"{number}")).status == 200
                if dying.asked and all(worker.asked for worker in full):
                    return
            raise AssertionError("they were never tried")

    run(story())
