"""A request reaches one worker and its answer the client, whatever happens to workers before the first byte."""

import asyncio
import errno
import json
import logging
from collections.abc import Iterator
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey

from marconi.router.gateway.app import ROUTER
from marconi.router.routing import Reason

from .house import house, right, until
from .stand_in import Fault, StandIn


def run(coroutine) -> None:  # type: ignore[no-untyped-def]
    asyncio.run(asyncio.wait_for(coroutine, 60))


def until_asked(worker: StandIn) -> Iterator[str]:
    """Prompts, as many as it takes for one to come to `worker`."""
    for number in range(1000):
        if worker.asked:
            return
        yield f"{number}"
    raise AssertionError("it was never tried")


def two() -> tuple[StandIn, StandIn]:
    return StandIn("a"), StandIn("b")


def test_answers_are_relayed_as_the_worker_gave_them_streamed_or_whole() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            whole = await home.ask("hello")
            assert (whole.status, whole.json["text"], whole.json["by"]) == (200, right("hello"), "a")
            stream = await home.ask("hello", stream=True)
            assert stream.headers["Content-Type"] == "text/event-stream"
            assert "X-Secret" not in stream.headers
            *sofar, done = stream.events
            assert done == "[DONE]"
            assert [json.loads(each)["text"] for each in sofar] == [right("hello")[: 8 * n] for n in (1, 2, 3, 4)]
            assert [body["text"] for body in worker.asked] == ["hello", "hello"]

    run(story())


def test_what_a_worker_says_no_to_is_not_tried_elsewhere() -> None:
    async def story() -> None:
        workers = two()
        async with house(*workers) as home:
            answer = await home.ask("hello", wrong=True)
            assert answer.status == 400
            assert answer.message.endswith("says no")
            assert sum(len(worker.asked) for worker in workers) == 1

    run(story())


def test_requests_of_one_prompt_cache_key_meet_until_their_worker_is_down() -> None:
    async def story() -> None:
        workers = tuple(StandIn(name) for name in "abcd")
        async with house(*workers) as home:
            by = [
                (await home.ask(f"{index}{'x' * 60}", prompt_cache_key=f"{index // 2}")).json["by"]
                for index in range(8)
            ]
            assert by[::2] == by[1::2]
            assert set(by) == set("abcd")
            recent = (await home.state())["recent"]
            assert [each["reason"] for each in reversed(recent)] == [Reason.COLD, Reason.AKIN] * 4
            other = await home.ask("another", prompt_cache_key=7)
            assert (other.status, (await home.state())["recent"][0]["reason"]) == (200, Reason.COLD), (
                "no string is no key"
            )
            (gone,) = [worker for worker in workers if worker.name == by[0]]
            await gone.kill()
            again = await home.ask(f"again{'y' * 60}", prompt_cache_key="0")
            assert (again.status, again.json["by"] != by[0]) == (200, True)

    run(story())


def test_the_next_turn_goes_where_the_first_went_and_hits() -> None:
    async def story() -> None:
        workers = tuple(StandIn(name) for name in "abcd")
        async with house(*workers) as home:
            for session in range(8):
                text = f"session {session}: {'x' * 60}"
                first = await home.ask(text)
                await home.until_told(*workers)
                second = await home.ask(text + " and then some more")
                assert second.json["by"] == first.json["by"]
                assert second.json["meta_info"]["cached_tokens"] == len(text) // 8 * 8
            recent = (await home.state())["recent"][0]
            assert recent["reason"] == "longest cached prefix"
            assert recent["num_hit_tokens"] == len(text) // 8 * 8
            assert sum(1 for worker in workers if worker.asked) > 1, "cold sessions spread"

    run(story())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [Fault.REFUSES, Fault.BREAKS])
def test_a_worker_that_fails_before_a_byte_has_its_requests_answered_by_another(fault: Fault, stream: bool) -> None:
    async def story() -> None:
        bad, good = two()
        async with house(bad, good) as home:
            bad.fault = fault
            for text in until_asked(bad):
                answer = await home.ask(text, stream=stream)
                assert answer.status == 200
                assert right(text).encode() in answer.body
            assert any(record["failures"] for record in (await home.state())["recent"])

    run(story())


def test_a_worker_that_hangs_goes_down_and_what_waits_for_it_is_answered_by_another() -> None:
    async def story() -> None:
        bad, good = two()
        async with house(bad, good) as home:
            bad.fault = Fault.HANGS
            asking = [asyncio.create_task(home.ask(f"{number}", stream=number % 2 == 0)) for number in range(10)]
            await until(lambda: len(bad.asked) >= 3)
            bad.is_healthy = False
            answers = await asyncio.gather(*asking)
            assert [answer.status for answer in answers] == [200] * 10
            assert all(right(f"{number}").encode() in answer.body for number, answer in enumerate(answers))

    run(story())


def test_a_worker_that_turns_requests_away_answers_those_that_it_took() -> None:
    class Slow(StandIn):
        async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if self.fault is Fault.NONE:
                await goes_on.wait()
            return await super()._answer(request, body)

    goes_on = asyncio.Event()

    async def story() -> None:
        worker = Slow("a")
        async with house(worker) as home:
            asking = [asyncio.create_task(home.ask(f"{number}")) for number in range(4)]
            await until(lambda: len(worker.asked) == 4)
            worker.fault = Fault.REFUSES
            assert (await home.ask("one more")).status == 503
            assert home.gateway.workers[worker.url].health.num_times_down == 1
            worker.fault = Fault.NONE
            goes_on.set()
            assert [(answer.status, answer.json["by"]) for answer in await asyncio.gather(*asking)] == [(200, "a")] * 4
            assert worker.num_aborted == 0

    run(story())


def test_a_worker_that_takes_too_long_for_a_byte_is_passed_over() -> None:
    async def story() -> None:
        bad, good = two()
        # Of the one that answers, a byte comes within this limit on a busy machine too.
        async with house(bad, good, first_byte_timeout_s=3.0) as home:
            bad.fault = Fault.HANGS
            for text in until_asked(bad):
                answer = await home.ask(text)
                assert (answer.status, answer.json["by"]) == (200, "b")

    run(story())


def test_after_a_byte_nothing_is_tried_again_and_the_stream_says_that_it_broke() -> None:
    async def story() -> None:
        workers = two()
        for worker in workers:
            worker.fault = Fault.BREAKS_LATER
        async with house(*workers) as home:
            answer = await home.ask("hello", stream=True)
            assert answer.status == 200
            *sofar, last = answer.events
            assert [json.loads(each)["text"] for each in sofar] == [right("hello")[:8], right("hello")[:16]]
            assert json.loads(last)["error"]["code"] == 502
            assert sum(len(worker.asked) for worker in workers) == 1

    run(story())


def test_a_stream_that_breaks_within_an_event_ends_with_whole_events() -> None:
    class Cut(StandIn):
        async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            await answer.write(b'data: {"text": "one"}\n\ndata: {"text": "one tw')
            await goes_on.wait()
            assert request.transport is not None
            request.transport.abort()
            return answer

    goes_on = asyncio.Event()

    async def story() -> None:
        async with house(Cut("a")) as home:
            async with home.client.post(home.url + "/generate", json={"text": "hello", "stream": True}) as answer:
                first = await answer.content.readuntil(b"\n\n")
                goes_on.set()
                *events, end = (first + await answer.read()).split(b"\n\n")
            assert end == b""
            told, failure = (json.loads(each.removeprefix(b"data: ")) for each in events)
            assert (told["text"], failure["error"]["code"]) == ("one", 502)

    run(story())


def test_a_stream_is_relayed_to_its_last_byte_whatever_that_is() -> None:
    class Odd(StandIn):
        async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            for piece in pieces:
                await answer.write(piece)
            await answer.write_eof()
            return answer

    pieces = [b"da", b"ta: " + b"x" * 300_000, b"y\n", b"\ndata: z\r\n\r\n: no end"]

    async def story() -> None:
        async with house(Odd("a")) as home:
            assert (await home.ask("hello", stream=True)).body == b"".join(pieces)

    run(story())


def test_a_stream_that_falls_silent_ends_and_says_so() -> None:
    async def story() -> None:
        worker = StandIn("a", step_s=3600)
        # Its first piece comes within this limit on a busy machine too.
        async with house(worker, first_byte_timeout_s=3.0) as home:
            *sofar, last = (await home.ask("hello", stream=True)).events
            assert [json.loads(each)["text"] for each in sofar] == [right("hello")[:8]]
            assert json.loads(last)["error"]["code"] == 502
            await until(lambda: worker.num_aborted == 1)
            assert home.gateway.dispatcher.num_running(worker.url) == 0

    run(story())


def test_all_requests_without_a_byte_are_answered_when_a_worker_is_killed_under_load() -> None:
    async def story() -> None:
        workers = tuple(StandIn(name, step_s=0.05) for name in "abc")
        async with house(*workers) as home:
            asking = [asyncio.create_task(home.ask(f"{number} {'y' * number}", stream=True)) for number in range(120)]
            await until(lambda: len(workers[0].asked) >= 10)
            await workers[0].kill()
            answers = await asyncio.gather(*asking)
            broken = 0
            for number, answer in enumerate(answers):
                assert answer.status == 200
                *sofar, last = answer.events
                if last == "[DONE]":
                    assert json.loads(sofar[-1])["text"] == right(f"{number} {'y' * number}")
                else:
                    assert sofar, "only what had streamed a byte may end so"
                    assert json.loads(last)["error"]["code"] == 502
                    broken += 1
            assert broken <= len(workers[0].asked)
            assert (await home.state())["workers"][0]["condition"] == "down"

    run(story())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_its_request_on_the_worker(stream: bool) -> None:
    async def story() -> None:
        worker = StandIn("a", step_s=30)
        async with house(worker) as home:
            asking = asyncio.create_task(home.ask("hello", stream=stream))
            await until(lambda: home.gateway.dispatcher.num_running(worker.url) == 1 and len(worker.asked) == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: worker.num_aborted == 1)
            await until(lambda: home.gateway.dispatcher.num_running(worker.url) == 0)
            assert home.gateway.up(), "no fault of the worker"
            home.gateway.dispatcher.check_invariants()

    run(story())


def test_a_client_that_goes_as_it_is_written_to_is_no_fault_and_leaves_nothing_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = web.StreamResponse.write

    async def goes(self: web.StreamResponse, piece: bytes) -> None:
        # Of the router's answer alone: the connection is closed, and what handles it is not told yet.
        if self._req is not None and ROUTER in self._req.app and self._req.transport is not None:
            self._req.transport.close()
        await write(self, piece)

    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            monkeypatch.setattr(web.StreamResponse, "write", goes)
            with pytest.raises(aiohttp.ClientError):
                await home.ask("hello", stream=True)
            monkeypatch.undo()
            await until(lambda: home.gateway.dispatcher.num_running(worker.url) == 0)
            assert "marconi_router_clients_gone_total 1.0" in (await home.get("/metrics")).body.decode()
            assert (await home.ask("again")).status == 200

    run(story())
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_requests_beyond_what_workers_may_have_are_turned_away_and_told_when() -> None:
    async def story() -> None:
        workers = two()
        for worker in workers:
            worker.fault = Fault.HANGS
        async with house(*workers, max_requests_per_worker=3) as home:
            asking = [asyncio.create_task(home.ask(f"{number}")) for number in range(6)]
            await until(lambda: sum(len(worker.asked) for worker in workers) == 6)
            turned_away = await home.ask("one more")
            assert turned_away.status == 503
            assert int(turned_away.headers["Retry-After"]) >= 1
            assert "every worker has 3 requests" in turned_away.message
            for task in asking:
                task.cancel()
            await until(lambda: all(home.gateway.dispatcher.num_running(worker.url) == 0 for worker in workers))
            for worker in workers:
                worker.fault = Fault.NONE
            assert (await home.ask("again")).status == 200

    run(story())


def test_a_router_that_has_no_socket_left_takes_no_worker_for_gone() -> None:
    class Full:
        async def request(self, *_: Any, **__: Any) -> None:
            key = ConnectionKey("127.0.0.1", 1, False, True, None, None, None)
            raise aiohttp.ClientConnectorError(key, OSError(errno.EMFILE, "Too many open files"))

    async def story() -> None:
        worker = StandIn("a", step_s=30)
        async with house(worker) as home:
            waiting = asyncio.create_task(home.ask("hello"))
            await until(lambda: len(worker.asked) == 1)
            forwarding = home.app[ROUTER].forwarding
            forwarding._upstream._session = cast(Any, Full())
            assert (await home.ask("one more")).status == 502
            member = home.gateway.workers[worker.url]
            assert (member.is_up, member.health.num_failures) == (True, 0)
            assert (await home.state())["recent"][0]["failures"][0].endswith("Too many open files]")
            assert not waiting.done()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    run(story())


def test_without_a_worker_there_is_a_503_that_says_so() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            await worker.kill()
            answer = await home.ask("hello")
            assert (answer.status, "Retry-After" in answer.headers) == (503, True)
            await until(lambda: not home.gateway.up())
            answer = await home.ask("hello")
            assert (answer.status, answer.message) == (503, "no worker is up")
            assert (await home.get("/health")).status == 503
            await worker.start()
            await home.until_up(1)
            assert (await home.ask("hello")).status == 200
            assert (await home.get("/health")).status == 200

    run(story())


def test_questions_about_the_model_are_any_workers() -> None:
    async def story() -> None:
        workers = two()
        async with house(*workers) as home:
            assert (await home.get("/v1/models")).json["data"] == [{"id": "a-model"}]
            await workers[0].kill()
            assert (await home.get("/v1/models")).json["from"] == "b"

    run(story())


def test_many_streams_at_once_all_end_with_their_own_answer() -> None:
    async def story() -> None:
        workers = tuple(StandIn(name, step_s=0.01) for name in "ab")
        async with house(*workers) as home:
            texts = [f"{number}: {'z' * (number % 50)}" for number in range(200)]
            answers = await asyncio.gather(*(home.ask(text, stream=True) for text in texts))
            for text, answer in zip(texts, answers, strict=True):
                assert json.loads(answer.events[-2])["text"] == right(text)
            assert all(home.gateway.dispatcher.num_running(worker.url) == 0 for worker in workers)

    run(story())


def test_a_broken_connection_of_a_client_is_no_fault_of_its_worker() -> None:
    async def story() -> None:
        worker = StandIn("a", step_s=0.05)
        async with house(worker) as home:
            for _ in range(5):
                async with aiohttp.ClientSession() as client:
                    answer = await client.post(home.url + "/generate", json={"text": "hello", "stream": True})
                    await answer.content.readany()
                    answer.close()
            await until(lambda: home.gateway.dispatcher.num_running(worker.url) == 0)
            assert home.gateway.workers[worker.url].health.num_failures == 0

    run(story())
