"""What counts as a worker's is what it served: nothing of what it refused, went with, or never could have taken."""

import asyncio
from typing import Any

import pytest

from marconi.model.learned_latency import MIN_OBSERVED

from .house import House, house, until
from .stand_in import Fault, StandIn

LONG = "z" * 100_000


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def warm(home: House, *workers: StandIn) -> float:
    return sum(home.gateway.dispatcher.affinity.warm_tokens(worker.url, 0.0) for worker in workers)


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_prompt_that_its_worker_refuses_starves_it_of_nothing(stream: bool) -> None:
    async def story() -> None:
        workers = StandIn("a"), StandIn("b")
        async with house(*workers) as home:
            refused = await home.ask(LONG, wrong=True, stream=stream)
            assert b"says no" in refused.body
            assert warm(home, *workers) == pytest.approx(0, abs=1e-6)
            assert len(home.gateway.dispatcher.fleet.guesses) == 0
            for number in range(12):
                await home.ask(f"{number}: {'x' * 40}", stream=stream)
            assert all(len(worker.asked) > 4 for worker in workers), "cold prompts go to both"
            metrics = (await home.get("/metrics")).body.decode()
            assert f"marconi_router_prompt_tokens_total {sum(len(f'{n}: ') + 40 for n in range(12)):.1f}" in metrics

    run(story())


def test_a_prompt_counts_where_it_was_served_and_not_where_it_was_lost() -> None:
    async def story() -> None:
        bad, good = StandIn("a"), StandIn("b")
        async with house(bad, good) as home:
            bad.fault = Fault.BREAKS
            for number in range(100):
                await home.ask(f"{number}: {'x' * 40}")
                if bad.asked:
                    break
            assert warm(home, bad) == pytest.approx(0, abs=1e-6)
            assert warm(home, good) > 0
            home.gateway.dispatcher.check_invariants()

    run(story())


def test_a_prompt_that_leaves_no_room_in_any_workers_context_is_refused_before_it_is_sent() -> None:
    async def story() -> None:
        small, large = StandIn("a", max_context_tokens=100), StandIn("b", max_context_tokens=200)
        async with house(small, large) as home:
            answer = await home.ask("x" * 200)
            assert (answer.status, answer.message) == (
                400,
                "the prompt must fit the workers' context, 199 tokens, got 200",
            )
            assert not small.asked + large.asked
            for number in range(8):
                assert (await home.ask(f"{number}{'x' * 150}")).json["by"] == "b"

    run(story())


def test_a_worker_that_does_not_say_how_long_its_context_is_is_asked() -> None:
    async def story() -> None:
        small, unknown = StandIn("a", max_context_tokens=100), StandIn("b")
        async with house(small, unknown) as home:
            assert (await home.ask("x" * 200)).json["by"] == "b"

    run(story())


def test_a_data_sheet_is_believed_no_longer_once_whole_answers_were_seen() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            for number in range(MIN_OBSERVED):
                assert not (await home.state())["prefill"]["is_known"]
                await home.ask(f"{number}: {'x' * (50 + number)}")
                await until(lambda: not home.gateway.dispatcher.num_running(worker.url))
            assert (await home.state())["prefill"]["is_known"]

    run(story())


def test_nothing_is_kept_of_a_whole_answer_whose_prefill_would_last_for_hours_by_the_model() -> None:
    async def story() -> None:
        async with house(StandIn("a")) as home:
            home.gateway.latency.overhead_s = 3600.0
            home.gateway.latency.s_per_flop = 1.0
            await home.ask("hello")
            await until(lambda: not home.gateway._prefill_ends)

    run(story())
