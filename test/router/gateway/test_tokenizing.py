"""Who tokenizes: the router where its workers' tokens are its own, else a worker, and for who gets no answer nobody."""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from marconi.router.gateway.worker import Condition
from marconi.router.prompts import PromptKind, remote
from marconi.router.prompts.check import Probe, hash_of

from .house import House, house, until
from .stand_in import MODEL, ByteReader, StandIn, living

TEXT = Probe("plain", PromptKind.TEXTS, {"prompt": "x"}, hash_of(list(b"x")))
CHAT = Probe("chat", PromptKind.CHATS, {"prompt": "chat"}, hash_of(list(b"chat")))
PARTS = Probe("parts", PromptKind.PARTS, {"prompt": "parts"}, hash_of(list(b"parts")))
UNKNOWN = Probe("plain", PromptKind.TEXTS, {"prompt": "x"}, None)
LONG = "a prompt of some blocks, and then some more of it"


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


@dataclass
class Picky(StandIn):
    """Tokenizes some prompts, after a while."""

    takes: tuple[str, ...] = ("x",)
    delay_s: float = 0.0
    status: int = 400
    answer: bytes | None = None
    """In place of a refusal."""

    async def tokenize(self, body: dict[str, Any]) -> web.Response:
        if body["prompt"] in self.takes:
            return await super().tokenize(body)
        await asyncio.sleep(self.delay_s)
        return web.Response(status=self.status) if self.answer is None else web.Response(body=self.answer)


class Shifted(StandIn):
    """Tokenizes as no other."""

    async def tokenize(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"tokens": [each + 1 for each in body["prompt"].encode()]})


async def num_hits(home: House, *texts: str) -> list[int]:
    """What was promised of each text, asked one after the other."""
    for text in texts:
        assert (await home.ask(text)).status == 200
    recent = (await home.state())["recent"]
    return [each["num_hit_tokens"] for each in reversed(recent)]


def test_prompts_are_read_for_the_model_that_the_workers_serve() -> None:
    async def story() -> None:
        async with house(StandIn("a")) as home:
            reader = home.gateway.reader
            assert isinstance(reader, ByteReader)
            assert reader.model == MODEL

    run(story())


def test_where_both_tokenize_alike_no_worker_is_asked() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker, probes=[TEXT, CHAT]) as home:
            assert (await num_hits(home, LONG, LONG))[1] > 0
            assert [question["prompt"] for question in worker.questions] == ["x", "chat"]
            state = await home.state()
            assert state["tokenizer"] == {
                "here": sorted(PromptKind),
                "num_asked_of_workers": 0,
                "num_not_answered": 0,
            }

    run(story())


@pytest.mark.parametrize("probe", [UNKNOWN, Probe("plain", PromptKind.TEXTS, {"prompt": "x"}, hash_of([9]))])
def test_without_a_tokenizer_like_theirs_workers_are_asked_once_for_each_prompt(
    probe: Probe, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        workers = StandIn("a"), StandIn("b")
        async with house(*workers, probes=[probe, CHAT]) as home:
            hits = await num_hits(home, LONG, LONG, LONG + " and on")
            assert hits == [0, len(LONG) // 8 * 8, len(LONG) // 8 * 8]
            asked = [each["prompt"] for worker in workers for each in worker.questions if each["prompt"] != "x"]
            assert sorted(asked) == [LONG, LONG + " and on"]
            state = await home.state()
            assert [each["num_prompt_tokens"] for each in state["recent"]] == [len(LONG) + 7, len(LONG), len(LONG)]
            assert state["tokenizer"] == {"here": [], "num_asked_of_workers": 2, "num_not_answered": 0}
            metrics = (await home.get("/metrics")).body.decode()
            assert "marconi_router_worker_tokenizations_total 2.0" in metrics

    with caplog.at_level(logging.WARNING):
        run(story())
    is_said = "its tokenizer is not this router's: the probe 'plain'" in caplog.text
    assert is_said == (probe.expected_hash is not None)


@pytest.mark.parametrize("status", [400, 500])
def test_a_template_that_is_another_leaves_texts_to_the_router(status: int) -> None:
    async def story() -> None:
        worker = Picky("a", status=status)
        async with house(worker, probes=[TEXT, CHAT]) as home:
            assert (await home.state())["tokenizer"]["here"] == ["texts"]
            assert (await num_hits(home, LONG, LONG))[1] > 0
            assert [question["prompt"] for question in worker.questions] == ["x", "chat"] * 2

    run(story())


def test_a_kind_of_chats_that_is_another_leaves_the_others_to_the_router(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with house(Picky("a", takes=("x", "chat")), probes=[TEXT, CHAT, PARTS]) as home:
            assert (await home.state())["tokenizer"]["here"] == sorted(set(PromptKind) - {PromptKind.PARTS})

    with caplog.at_level(logging.WARNING):
        run(story())
    assert "workers tokenize" not in caplog.text, "what many templates do is nothing to mend"


@pytest.mark.parametrize(
    "answer", [None, b"", b"{", b"[]", b"{}", b'{"tokens": []}', b'{"tokens": [-1]}', b'{"tokens": [[1]]}', b"[" * 9999]
)
def test_a_prompt_that_no_worker_tokenizes_is_answered_all_the_same(answer: bytes | None) -> None:
    async def story() -> None:
        async with house(Picky("a", answer=answer), probes=[UNKNOWN]) as home:
            assert await num_hits(home, LONG, LONG) == [0, 0]
            state = await home.state()
            assert [each["num_prompt_tokens"] for each in state["recent"]] == [None, None]
            assert state["tokenizer"] == {"here": [], "num_asked_of_workers": 2, "num_not_answered": 2}
            home.gateway.dispatcher.check_invariants()

    run(story())


def test_who_waits_for_tokens_waits_no_longer_than_it_may_and_with_no_more_than_there_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first two may wait for as long as the test lasts: who is not answered at once is not answered at all."""
    monkeypatch.setattr(remote, "TIMEOUT_S", 3600.0)
    monkeypatch.setattr(remote, "MAX_AT_ONCE", 2)
    monkeypatch.setattr(remote, "MAX_BYTES", 1000)

    async def story() -> None:
        worker = Picky("a", delay_s=3600)
        async with house(worker, probes=[UNKNOWN]) as home:
            worker.questions.clear()
            waiting = [asyncio.create_task(home.ask(f"{number}")) for number in range(2)]
            await until(lambda: len(worker.questions) == 2)
            assert (await home.ask("one too many")).status == 200
            assert (await home.ask("x" * 2000)).status == 200
            assert len(worker.questions) == 2
            for task in waiting:
                assert not task.done()
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            remote_tokens = home.gateway.remote
            assert remote_tokens is not None
            await until(lambda: remote_tokens._num_waiting == 0)
            monkeypatch.setattr(remote, "TIMEOUT_S", 0.5)
            began_s = time.monotonic()
            assert (await home.ask("another")).status == 200
            assert time.monotonic() - began_s >= 0.5
            assert len(worker.questions) == 3
            assert (await home.ask("x" * 2000)).status == 200
            assert len(worker.questions) == 3, "too long to be asked about, whoever waits"

    run(story())


def test_what_is_kept_of_workers_tokens_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_CACHED_IDS", 100)

    async def story() -> None:
        worker = StandIn("a")
        async with house(worker, probes=[UNKNOWN]) as home:
            for text in ("1" * 60, "2" * 30, "1" * 60, "3" * 30, "2" * 30, "4" * 200):
                assert (await home.ask(text)).status == 200
            told = home.gateway.remote
            assert told is not None
            assert told._num_cached_ids == sum(map(len, told._cached.values())) <= 100
            asked = [each["prompt"][0] for each in worker.questions if each["prompt"] != "x"]
            assert asked == ["1", "2", "3", "2", "4"], "the one used longest ago goes first"

    run(story())


@pytest.mark.parametrize("probes", [[UNKNOWN], [TEXT]])
def test_workers_that_tokenize_unlike_each_other_are_not_mixed(probes: list[Probe]) -> None:
    async def story() -> None:
        first, second = StandIn("a"), Shifted("b")
        async with house(first, probes=probes) as home, living(second):
            assert (await home.post("/router/workers", {"url": second.url})).status == 202
            await until(lambda: home.gateway.workers[second.url].health.condition is Condition.REFUSED)
            assert "its tokenizer is not " in home.gateway.workers[second.url].health.why
            assert (await num_hits(home, LONG, LONG))[1] > 0
            # Once the first is gone it is the second's that counts.
            async with home.client.delete(home.url + "/router/workers", json={"url": first.url}) as answer:
                assert answer.status == 200
            await home.until_up(1)
            assert (await home.state())["tokenizer"]["here"] == []
            assert (await home.ask(LONG)).json["by"] == "b"

    run(story())


def test_a_worker_that_answers_no_text_with_tokens_is_no_worker() -> None:
    async def story() -> None:
        async with house(Picky("a", takes=()), probes=[TEXT], waits=False) as home:
            (member,) = home.gateway.workers.values()
            await until(lambda: member.health.condition is Condition.REFUSED)

    run(story())
