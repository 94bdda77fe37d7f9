"""Data-parallel ranks behind one address: each is chosen for what it holds itself, and the request says which."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from marconi.router.gateway.worker import Condition

from .house import House, house, until
from .ranked import Ranked
from .schedules import Unreliable
from .stand_in import BLOCK_TOKENS, Fault, StandIn, living


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def promised(home: House) -> Any:
    return (await home.state())["recent"][0]


@pytest.mark.parametrize("is_deaf", [False, True], ids=["", "negative control: the rank is not heard"])
def test_conversations_go_on_where_they_are_held(is_deaf: bool) -> None:
    async def story() -> None:
        worker = Ranked("a", num_ranks=3, is_deaf=is_deaf)
        async with house(worker) as home:
            texts = [f"conversation {number}: " + "x" * 40 for number in range(5)]
            homes: dict[int, set[str]] = {}
            hits = []
            for _ in range(3):
                for number, text in enumerate(texts):
                    told = (await home.ask(text)).json["meta_info"]
                    record = await promised(home)
                    homes.setdefault(number, set()).add(record["worker"])
                    hits.append((record["num_hit_tokens"], told["cached_tokens"]))
                    texts[number] += " and then?"
                await until(lambda: worker.is_known(home.gateway))
            are_as_promised = [expected == cached for expected, cached in hits]
            if is_deaf:
                assert not all(are_as_promised)
                return
            assert all(are_as_promised)
            assert set.union(*homes.values()) == set(worker.names())
            assert all(len(names) == 1 for names in homes.values())
            assert all(cached >= 48 // BLOCK_TOKENS * BLOCK_TOKENS for _, cached in hits[5:])

    run(story())


def test_each_rank_repairs_its_own_events() -> None:
    async def story() -> None:
        worker = Ranked("a")
        async with house(worker, snapshot_period_s=0.2) as home:
            publisher = worker.publishers[0]
            publisher._pub = Unreliable(publisher._pub, SimpleNamespace(random=lambda: 0.0))  # type: ignore[arg-type]
            for number in range(8):
                assert (await home.ask(f"{number}: {'x' * 40}", routed_dp_rank=number % 2)).status == 200
            await until(lambda: worker.is_known(home.gateway))
            assert all(worker.holdings[rank].states for rank in range(2))

    run(story())


def test_ranks_come_and_go_with_their_worker() -> None:
    async def story() -> None:
        worker, other = Ranked("a"), StandIn("b")
        async with house(worker, other) as home:
            assert set(home.gateway.dispatcher.workers) == {*worker.names(), other.url}
            await home.ask("x" * 40, routed_dp_rank=1)
            await until(lambda: worker.is_known(home.gateway))
            for num_ranks in (3, 1, 2):
                await worker.kill()
                await until(lambda: len(home.gateway.up()) == 1)
                assert (await home.ask("y" * 40)).json["by"] == "b"
                worker.num_ranks = num_ranks
                await worker.start()
                await home.until_up(2)
                names = worker.names() if num_ranks > 1 else [worker.url]
                assert set(home.gateway.dispatcher.workers) == {*names, other.url}
                assert set(home.gateway.ranks) == {*names, other.url}
            await home.ask("z" * 40, routed_dp_rank=1)
            await until(lambda: worker.is_known(home.gateway))
            async with home.client.delete(home.url + "/router/workers", json={"url": worker.url}) as answer:
                assert answer.status == 200
            assert list(home.gateway.ranks) == [other.url]
            home.gateway.dispatcher.check_invariants()

    run(story())


def test_two_ranks_that_publish_by_one_name_are_no_worker() -> None:
    class Twins(Ranked):
        def _said(self, name: str, events: tuple[str, str]) -> dict[str, Any]:
            return super()._said("twin", events)

    async def story() -> None:
        worker, other = Twins("a"), StandIn("b")
        async with living(worker), house(other) as home:
            assert (await home.post("/router/workers", {"url": worker.url})).status == 202
            health = home.gateway.workers[worker.url].health
            await until(lambda: health.condition is Condition.REFUSED)
            assert "publishes its events as 'twin', and so does" in health.why
            assert "twin" not in home.gateway.feed._names, "of neither"

    run(story())


def test_a_request_that_its_worker_went_with_is_not_given_to_another_rank_of_it() -> None:
    async def story() -> None:
        worker, other = Ranked("a", fault=Fault.BREAKS), Ranked("b")
        async with house(worker, other) as home:
            for number in range(8):
                answer = await home.ask(f"{number}: {'x' * 40}")
                assert (answer.status, answer.json["by"]) == (200, "b")
            assert worker.went_with
            assert len(set(worker.went_with)) == len(worker.went_with)

    run(story())


@pytest.mark.parametrize(
    ("headers", "wish", "rank"),
    [
        ({}, {"routed_dp_rank": 1}, 1),
        ({}, {"data_parallel_rank": 1}, 1),
        ({}, {"routed_dp_rank": 0, "data_parallel_rank": 1}, 0),
        ({"x-data-parallel-rank": "1"}, {}, 1),
        ({"X-Data-Parallel-Rank": "1"}, {"routed_dp_rank": 0}, 1),
        ({"X-Override-Routed-Dp-Rank": "0", "X-Data-Parallel-Rank": "1"}, {}, 0),
    ],
)
def test_a_client_that_asks_for_a_rank_gets_it(headers: dict[str, str], wish: dict[str, int], rank: int) -> None:
    """Its own turn on the other rank would be a hit: the wish goes first, as on the server."""

    async def story() -> None:
        worker = Ranked("a")
        async with house(worker) as home:
            text = "x" * 40
            await home.ask(text, routed_dp_rank=1 - rank)
            await until(lambda: worker.is_known(home.gateway))
            answer = await home.post("/generate", {"text": text + "more", **wish}, headers)
            assert (answer.status, answer.json["meta_info"]["cached_tokens"]) == (200, 0)
            assert worker.served_by == [1 - rank, rank]
            assert (await promised(home))["worker"] == f"{worker.url}/{rank}"
            without = await home.post("/generate", {"text": text + "and more"})
            assert without.json["meta_info"]["cached_tokens"] == 40

    run(story())


@pytest.mark.parametrize(
    ("wish", "headers", "got"),
    [
        ({"routed_dp_rank": 2}, {}, "got 2"),
        ({"routed_dp_rank": -1}, {}, "got -1"),
        ({"routed_dp_rank": "a secret"}, {}, "got a str"),
        ({"routed_dp_rank": [1]}, {}, "got a list"),
        ({}, {"X-Data-Parallel-Rank": "a secret"}, "got a str"),
    ],
)
def test_a_rank_that_no_worker_has_is_refused_in_a_line(wish: Any, headers: dict[str, str], got: str) -> None:
    async def story() -> None:
        worker = Ranked("a")
        async with house(worker) as home:
            answer = await home.post("/generate", {"text": "x", **wish}, headers)
            assert (answer.status, answer.message) == (
                400,
                f"routed_dp_rank must be a data-parallel rank of a worker, 0 to 1, {got}",
            )
            assert not worker.asked

    run(story())


def test_a_worker_that_does_not_tell_its_ranks_apart_gets_the_body_and_the_wish_as_they_came() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            assert (await home.ask("x", routed_dp_rank=7)).status == 200
            assert (await home.ask("y")).status == 200
            assert [body.get("routed_dp_rank") for body in worker.asked] == [7, None]

    run(story())


def test_a_wish_for_a_rank_of_a_worker_that_is_down_is_not_somebody_elses() -> None:
    async def story() -> None:
        worker, other = Ranked("a", num_ranks=3), Ranked("b")
        async with house(worker, other) as home:
            await worker.kill()
            await until(lambda: len(home.gateway.up()) == 1)
            assert (await home.ask("x", routed_dp_rank=2)).status == 503
            assert (await home.ask("x", routed_dp_rank=1)).json["by"] == "b"

    run(story())


def test_a_limit_of_requests_is_of_each_rank() -> None:
    class Slow(Ranked):
        async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await goes_on.wait()
            return await super()._answer(request, body)

    goes_on = asyncio.Event()

    async def story() -> None:
        worker = Slow("a")
        async with house(worker, max_requests_per_worker=1) as home:
            asking = [asyncio.create_task(home.ask(f"{number}")) for number in range(2)]
            await until(lambda: len(worker.asked) == 2)
            assert (await home.ask("one more")).status == 503
            goes_on.set()
            assert [answer.status for answer in await asyncio.gather(*asking)] == [200, 200]
            assert sorted(worker.served_by) == [0, 1]

    run(story())


def test_the_administrator_sees_each_rank() -> None:
    async def story() -> None:
        worker = Ranked("a")
        async with house(worker) as home:
            await home.ask("x" * 40, routed_dp_rank=1)
            await until(lambda: worker.is_known(home.gateway))
            shown = (await home.state())["workers"]
            assert [(each["name"], each["url"], each["dp_rank"]) for each in shown] == [
                (f"{worker.url}/{rank}", worker.url, rank) for rank in range(2)
            ]
            assert [each["events"]["name_in_events"] for each in shown] == ["a", "a/1"]
            assert [each["events"]["num_entries"] > 0 for each in shown] == [False, True]
            metrics = (await home.get("/metrics")).body.decode()
            for rank in range(2):
                assert f'marconi_router_worker_up{{worker="{worker.url}/{rank}"}} 1.0' in metrics

    run(story())
