"""A worker takes requests once it has said what it is and could generate, and no longer than it can."""

import asyncio
import logging
import re
import time
from typing import Any

import pytest
from aiohttp import web

from marconi.events.base import WorkerLoad
from marconi.router.description import Description, describe, loads_of, worker_url
from marconi.router.gateway.app import ROUTER
from marconi.router.gateway.settings import HealthLimits
from marconi.router.gateway.worker import Condition, Health, Worker

from .house import House, house, right, routed, until
from .stand_in import BLOCK_TOKENS, Fault, StandIn, living


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def worker_of(home: House, worker: StandIn) -> Any:
    (found,) = [each for each in (await home.state())["workers"] if each["url"] == worker.url]
    return found


def test_a_worker_that_restarts_is_forgotten_at_once_and_known_anew() -> None:
    async def story() -> None:
        worker, other = StandIn("a"), StandIn("b")
        async with house(worker, other) as home:
            for number in range(20):
                await home.ask(f"{number}: {'x' * 40}")
            await home.until_told(worker, other)
            index = home.gateway.dispatcher.fleet.index
            assert index.holding(worker.url).num_entries
            kept = index.holding(other.url).num_entries
            await worker.kill()
            await worker.start()
            await home.until_up(2)
            await until(lambda: index.holding(worker.url).num_entries == 0)
            assert index.holding(other.url).num_entries == kept
            for number in range(20):
                await home.ask(f"{number}: {'x' * 40}")
            await home.until_told(worker, other)

    run(story())


def test_a_router_that_restarts_knows_what_workers_hold_while_it_serves() -> None:
    async def story() -> None:
        workers = StandIn("a"), StandIn("b")
        async with living(*workers):
            async with routed(*workers) as home:
                await home.until_up(2)
                by = {text: (await home.ask(text)).json["by"] for text in (f"{n}: {'x' * 40}" for n in range(12))}
            async with routed(*workers) as home:
                await home.until_up(1)
                assert (await home.ask("at once")).status == 200
                await home.until_told(*workers)
                for text, name in by.items():
                    again = (await home.ask(text + " and more")).json
                    assert again["by"] == name
                    assert again["meta_info"]["cached_tokens"] == len(text) // 8 * 8

    run(story())


def sglangs_loads(**fields: Any) -> Any:
    """An answer of SGLang 0.5.23."""
    load = {
        "timestamp": 1.0, "dp_rank": 0, "num_running_reqs": 3, "num_waiting_reqs": 2, "num_waiting_uncached_tokens": 70,
        "num_used_tokens": 9, "max_total_num_tokens": 100, "max_running_requests": 4, "token_usage": 0.09,
    }  # fmt: skip
    return {"timestamp": "2026-01-01T00:00:00+00:00", "version": "0.5.23", "loads": [{**load, **fields}]}


def test_a_worker_without_events_is_asked_for_its_load_at_each_check() -> None:
    async def story() -> None:
        busy, quiet, old = StandIn("a", tells=False), StandIn("b"), StandIn("c", tells=False)
        busy.loads = quiet.loads = sglangs_loads()
        async with house(busy, quiet, old) as home:
            await home.until_up(3)
            fleet = home.gateway.dispatcher.fleet
            await until(lambda: fleet.sync(busy.url).load_report is not None)
            told = fleet.sync(busy.url).load_report
            assert told is not None
            assert told.load == WorkerLoad(3, 2, 4, 70)
            assert quiet.publisher is not None
            quiet.publisher.publish_load(WorkerLoad(1, 0, 8, 0))
            await until(lambda: (word := fleet.sync(quiet.url).load_report) is not None and word.sequence is not None)
            busy.loads = sglangs_loads(num_running_reqs=0)
            quiet.loads = sglangs_loads(num_running_reqs=9)
            await until(lambda: (word := fleet.sync(busy.url).load_report) is not None and word.load.num_running == 0)
            told = fleet.sync(quiet.url).load_report
            assert told is not None
            assert told.load.num_running == 1, "its events say"
            assert fleet.sync(old.url).load_report is None

    run(story())


@pytest.mark.parametrize(
    "answer",
    [[], {}, {"loads": 5}, {"loads": [5]}, sglangs_loads(dp_rank="0"), sglangs_loads(num_running_reqs=-1),
     sglangs_loads(max_running_requests=0), sglangs_loads(num_waiting_uncached_tokens=None)],
)  # fmt: skip
def test_loads_that_cannot_be_read_are_none_and_say_nothing_of_health(answer: Any) -> None:
    assert loads_of(answer) == {}
    assert loads_of(sglangs_loads(dp_rank=1)) == {1: WorkerLoad(3, 2, 4, 70)}

    async def story() -> None:
        worker = StandIn("a", tells=False)
        worker.loads = answer
        async with house(worker) as home:
            await home.until_up(1)
            checks = home.app[ROUTER].checks
            (found,) = home.gateway.workers.values()
            await checks.ask_load(found)
            assert found.is_up
            assert home.gateway.dispatcher.fleet.sync(worker.url).load_report is None

    run(story())


def test_another_model_at_a_workers_address_gets_no_request() -> None:
    async def story() -> None:
        worker, other = StandIn("a"), StandIn("b")
        async with house(worker, other) as home:
            await worker.kill()
            worker.model = "another-model"
            await worker.start()
            await until(lambda: home.gateway.workers[worker.url].health.condition is Condition.REFUSED)
            assert "got 'another-model'" in (await worker_of(home, worker))["why"]
            asked = len(worker.asked)
            assert all([(await home.ask(f"{n}")).json["by"] == "b" for n in range(6)])
            assert len(worker.asked) == asked
            await worker.kill()
            worker.model = other.model
            await worker.start()
            await home.until_up(2)

    run(story())


def test_a_worker_that_goes_while_it_is_checked_is_asked_again_what_it_is() -> None:
    class Checked(StandIn):
        goes_on: asyncio.Event | None = None
        num_checks = num_told = 0

        async def _health(self, request: web.Request) -> web.Response:
            self.num_checks += 1
            if self.goes_on is not None:
                await self.goes_on.wait()
            return await super()._health(request)

        async def _marconi(self, request: web.Request) -> web.Response:
            self.num_told += 1
            return await super()._marconi(request)

    async def story() -> None:
        worker = Checked("a")
        async with house(worker) as home:
            worker.goes_on, num_checks, num_told = asyncio.Event(), worker.num_checks, worker.num_told
            await until(lambda: worker.num_checks > num_checks)
            home.gateway.workers[worker.url].failed("gone", is_gone=True)
            worker.goes_on.set()
            await home.until_up(1)
            assert worker.num_told > num_told

    run(story())


def test_a_worker_that_tells_where_nobody_can_listen_silences_no_other() -> None:
    class Nowhere(StandIn):
        async def _marconi(self, _: web.Request) -> web.Response:
            nowhere = "ipc:///tmp/" + "x" * 500
            events = {**EVENTS, "worker": self.name, "model": self.model, "block_tokens": BLOCK_TOKENS}
            return web.json_response({"ranks": [{"events": {**events, "events": nowhere, "replay": nowhere}}]})

    async def story() -> None:
        worker, other = Nowhere("a"), StandIn("b")
        async with house(worker) as home, living(other):
            assert (await home.post("/router/workers", {"url": other.url})).status == 202
            await home.until_up(2)
            async with home.client.delete(home.url + "/router/workers", json={"url": worker.url}) as answer:
                assert answer.status == 200
            await home.ask("x" * 40)
            await home.until_told(other)

    run(story())


def test_a_worker_without_events_takes_requests_and_says_so() -> None:
    async def story() -> None:
        worker, other = StandIn("a", tells=False), StandIn("b")
        async with house(worker, other) as home:
            for number in range(16):
                assert (await home.ask(f"{number}")).status == 200
            assert worker.asked
            assert (await worker_of(home, worker))["without_events"] == "it publishes no events: --marconi-events"

    run(story())


def test_two_workers_that_tell_by_one_name_are_not_mixed_up() -> None:
    async def story() -> None:
        first, second = StandIn("same"), StandIn("same")
        async with living(first, second), routed(first, second) as home:
            await until(lambda: Condition.REFUSED in [each.health.condition for each in home.gateway.workers.values()])
            refused = [each for each in home.gateway.workers.values() if each.health.condition is Condition.REFUSED]
            assert "and so does" in refused[0].health.why
            assert (await home.ask("hello")).json["text"] == right("hello")
            await home.app[ROUTER].checks.check(refused[0])
            assert refused[0].health.condition is Condition.REFUSED, "however often it is asked"
            (other,) = home.gateway.up()
            async with home.client.delete(home.url + "/router/workers", json={"url": other.url}) as answer:
                assert answer.status == 200
            await home.until_up(1)
            await home.ask("x" * 40)
            await home.until_told(first if refused[0].url == first.url else second)

    run(story())


def test_workers_that_all_come_back_with_another_model_are_taken_as_that() -> None:
    async def story() -> None:
        workers = StandIn("a"), StandIn("b")
        async with house(*workers) as home:
            for worker in workers:
                await worker.kill()
            # Requests see at once what checks see later.
            assert (await home.ask("hello")).status == 503
            assert not home.gateway.up()
            for worker in workers:
                worker.model = "another-model"
                await worker.start()
            await home.until_up(2)
            await home.ask("x" * 40)
            await home.until_told(*workers)
            assert home.gateway.dispatcher.fleet.index.num_blocks == 4

    run(story())


def test_workers_come_and_go_by_the_administrators_word() -> None:
    async def story() -> None:
        first, second = StandIn("a"), StandIn("b")
        async with living(second), house(first) as home:
            assert (await home.post("/router/workers", {"url": second.url})).status == 202
            assert (await home.post("/router/workers", {"url": second.url})).status == 409
            await home.until_up(2)
            async with home.client.delete(home.url + "/router/workers", json={"url": first.url}) as answer:
                assert answer.status == 200
            assert all([(await home.ask(f"{n}")).json["by"] == "b" for n in range(6)])
            async with home.client.delete(home.url + "/router/workers", json={"url": first.url}) as answer:
                assert answer.status == 404
            assert (await home.post("/router/workers", {"url": "nowhere"})).status == 400
            assert (await home.post("/router/workers", [])).status == 400

    run(story())


def test_a_removed_worker_answers_what_it_was_given() -> None:
    async def story() -> None:
        first, second = StandIn("a", step_s=0.2), StandIn("b")
        async with house(first, second) as home:
            asking = [asyncio.create_task(home.ask(f"{n}", stream=True)) for n in range(8)]
            await until(lambda: len(first.asked) > 0)
            async with home.client.delete(home.url + "/router/workers", json={"url": first.url}) as answer:
                assert answer.status == 200
            assert [answer.events[-1] for answer in await asyncio.gather(*asking)] == ["[DONE]"] * 8

    run(story())


def test_what_is_wrong_on_the_wire_is_dropped_and_counted_and_the_rest_goes_on() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            await home.ask("x" * 40)
            await home.until_told(worker)
            publisher = worker.publisher
            assert publisher is not None
            # The publisher's thread owns its socket: what is wrong is put where it would send what is right.
            encoder = publisher._encoder
            batch = encoder.batch
            encoder.batch = lambda *_: b"\xc1 no msgpack"  # type: ignore[method-assign]
            await home.ask("y" * 40)
            stats = home.gateway.feed.subscriber.stats
            await until(lambda: sum(stats.dropped.values()) > 0)
            encoder.batch = batch  # type: ignore[method-assign]
            await home.ask("z" * 40)
            await home.until_told(worker)
            assert (await home.state())["events"]["dropped"] == {"malformed": sum(stats.dropped.values())}

    run(story())


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:30001", "http://127.0.0.1:30001"),
        (" http://host:1/ ", "http://host:1"),
        ("https://[::1]:30001", "https://[::1]:30001"),
    ],
)
def test_a_workers_url_has_one_form(text: str, url: str) -> None:
    assert worker_url(text) == url


@pytest.mark.parametrize(
    "text", ["", "host:1", "http://host", "http://host:x", "ftp://h:1", "http://h:1/v1", "http://:1", "http://[::1"]
)
def test_what_is_no_url_of_a_worker_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("must be a URL like http://127.0.0.1:30001")):
        worker_url(text)


EVENTS = {
    "version": 1,
    "worker": "host:30001/0",
    "events": "tcp://127.0.0.1:5557",
    "replay": "tcp://127.0.0.1:5558",
    "needs_keys": False,
    "model": "m",
    "block_tokens": 64,
}


RANKS = [{"dp_rank": rank, "events": {**EVENTS, "worker": f"host:30001/{rank}"}} for rank in range(2)]


def described(**changes: Any) -> Description:
    marconi = {"ranks": [{"events": {**EVENTS, **changes}}]}
    return describe("http://127.0.0.1:30001", {"served_model_name": "m"}, marconi, None)


def test_an_address_of_every_interface_is_the_port_at_the_workers_own_host() -> None:
    for host in ("*", "0.0.0.0", "[::]"):  # noqa: S104
        (events,) = described(events=f"tcp://{host}:7001", replay=f"tcp://{host}:7002").events
        assert (events.sockets.events, events.sockets.replay) == ("tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "must be 1, got 2"),
        ({"worker": ""}, "worker of its events must be of type str, got ''"),
        ({"block_tokens": True}, "block_tokens of its events must be of type int, got True"),
        ({"block_tokens": "64"}, "block_tokens of its events must be of type int, got '64'"),
        ({"events": "tcp://nowhere"}, "an address must be"),
        ({"needs_keys": True}, ": --events-keys"),
        ({"events": "tcp://10.1.2.3:5557"}, "CURVE keys"),
    ],
)
def test_events_that_cannot_be_listened_to_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        described(**changes)


@pytest.mark.parametrize(
    ("model_info", "marconi", "words"),
    [
        ([], None, "must be an SGLang server"),
        ({}, None, "must be an SGLang server"),
        ({"model_path": "m", "is_generation": False}, None, "makes embeddings"),
        ({"model_path": "m"}, {"ranks": []}, "must list the server's ranks"),
        ({"model_path": "m"}, {"ranks": [{}, {}]}, r"must list data-parallel ranks 0 to 1, got \[None, None\]"),
        ({"model_path": "m"}, {"ranks": [RANKS[1], RANKS[0]]}, r"ranks 0 to 1, got \[1, 0\]"),
        ({"model_path": "m"}, {"ranks": [RANKS[0], {"dp_rank": 1}]}, "must all publish events, and hash alike"),
        (
            {"model_path": "m"},
            {"ranks": [RANKS[0], {"dp_rank": 1, "events": {**EVENTS, "block_tokens": 16}}]},
            "must all publish events, and hash alike",
        ),
    ],
)
def test_what_is_no_worker_of_a_router_is_refused_by_name(model_info: Any, marconi: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        describe("http://127.0.0.1:30001", model_info, marconi, None)


def test_a_description_lists_ranks_with_the_events_of_each() -> None:
    found = describe("http://127.0.0.1:30001", {"model_path": "m"}, {"ranks": RANKS}, None)
    assert found.ranks == (0, 1)
    assert [source.sockets.worker for source in found.events] == ["host:30001/0", "host:30001/1"]
    silent = describe("http://127.0.0.1:30001", {"model_path": "m"}, {"ranks": [{"dp_rank": 0}, {"dp_rank": 1}]}, None)
    assert (silent.ranks, silent.events) == ((0, 1), ())
    assert described().ranks == (None,)


def test_failures_in_a_row_take_a_worker_down_and_a_check_brings_it_back() -> None:
    health = Health(HealthLimits(max_failures=3, period_s=4.0, first_retry_s=0.5))
    health.passed()
    assert [health.failed("broke"), health.failed("broke")] == [False, False]
    health.succeeded()
    assert [health.failed("broke") for _ in range(3)] == [False, False, True]
    assert (health.condition, health.why, health.num_times_down) == (Condition.DOWN, "broke", 1)
    assert [health.next_check_s() for _ in range(6)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    health.passed()
    assert (health.condition, health.next_check_s()) == (Condition.UP, 4.0)
    assert health.failed("refused the connection", is_gone=True)
    health.succeeded()
    assert health.condition is Condition.DOWN, "a late answer does not bring it back"


@pytest.mark.parametrize("name", HealthLimits.__slots__)
def test_limits_of_health_checks_are_above_0(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be above 0, got 0"):
        HealthLimits(**{name: 0})


def test_no_word_of_a_prompt_is_in_logs_metrics_or_the_state(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> str:
        worker = StandIn("a")
        async with house(worker) as home:
            await home.ask("a secret of mine", stream=True)
            worker.fault = Fault.BREAKS_LATER
            await home.ask("a secret of mine", stream=True)
            await home.post("/generate", b'{"text": "a secret of mine')
            home.gateway.reader.read = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
            assert (await home.ask("a secret of mine")).status == 500
            assert (await home.state())["recent"][0]["status"] == 500
            assert b'requests_total{route="/generate",status="500"} 1.0' in (await home.get("/metrics")).body
            return (await home.get("/router")).body.decode() + (await home.get("/metrics")).body.decode()

    with caplog.at_level(logging.DEBUG):
        told = asyncio.run(story())
    assert "ZeroDivisionError" in caplog.text, "faults are logged"
    assert "secret" not in told + caplog.text


def test_going_down_brings_forward_what_is_waited_for_and_leaves_what_has_passed() -> None:
    async def story() -> None:
        member = Worker("http://127.0.0.1:1", Health(HealthLimits(max_failures=1)))
        member.health.passed()
        loop = asyncio.get_running_loop()
        ended: list[str] = []

        async def wait(name: str, seconds: float) -> None:
            try:
                async with asyncio.timeout(seconds) as deadline:
                    member.waiting.add(deadline)
                    await asyncio.sleep(3600)
            except TimeoutError:
                ended.append(name)

        waiting = [asyncio.create_task(wait("short", 0.01)), asyncio.create_task(wait("long", 3600))]
        await asyncio.sleep(0)
        # Both deadlines are handled in one turn of the loop: the short one is passing when the worker goes down.
        loop.call_at(loop.time() + 0.01, lambda: member.failed("gone"))
        time.sleep(0.02)
        await asyncio.gather(*waiting)
        assert sorted(ended) == ["long", "short"]

    run(story())
