"""Among replicas that a host keeps, a call goes where its states are; where that is unknown, by the host's own rule."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("zmq", reason="the router extra is not installed: pip install '.[router]'")

import aiohttp
from hypothesis import given, settings
from hypothesis import strategies as st

from marconi.events.base import SHARED_ELSEWHERE
from marconi.events.hashes import HashSpace
from marconi.model import load
from marconi.model.learned_latency import LearnedLatency
from marconi.router.dispatch import prompt_of
from marconi.router.prompts import PromptKind
from marconi.router.sync import State
from marconi_ray import replicas as module
from marconi_ray.call import Call
from marconi_ray.replicas import Replicas
from router.gateway.stand_in import BLOCK_TOKENS, ByteReader, StandIn, living

FLOPS = load("qwen3-next-80b-a3b").prefix_flops


async def until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    give_up_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_s, "it never came to be"
        await asyncio.sleep(0.01)


def run(story: Awaitable[None]) -> None:
    async def within() -> None:
        await asyncio.wait_for(story, 60)  # type: ignore[arg-type]

    asyncio.run(within())


def call(text: str, **more: Any) -> Call:
    return Call("POST", "/generate", (), json.dumps({"text": text, **more}).encode())


async def said(worker: StandIn) -> dict[str, Any]:
    """As a replica would tell of it."""
    told: dict[str, Any] = {"url": worker.url}
    async with aiohttp.ClientSession(trust_env=False) as session:
        for name in ("model_info", "marconi"):
            async with session.get(f"{worker.url}/{name}") as answer:
                told[name] = await answer.json()
    return told


@asynccontextmanager
async def chosen_by(*workers: StandIn) -> AsyncIterator[Replicas]:
    async with living(*workers):
        made = Replicas(ByteReader(), LearnedLatency(FLOPS))
        made.start()
        try:
            made.update({worker.name: await said(worker) for worker in workers})
            yield made
        finally:
            made.close()


def serve(worker: StandIn, text: str, model: str | None = None) -> None:
    """Have it hold a prompt."""
    space = HashSpace.of(model or worker.model, None, None)
    worker.holding.keep(space, prompt_of(list(text.encode()), space, BLOCK_TOKENS).chain.hashes)


def hears_all(made: Replicas, *workers: StandIn) -> Callable[[], bool]:
    """Whether it knows exactly what the workers hold."""

    def holds() -> bool:
        index = made.dispatcher.fleet.index
        return all(
            worker.name in index.workers
            and made.dispatcher.fleet.sync(worker.name).state is State.CURRENT
            and not worker.holding.num_waiting
            and index.holding(worker.name).num_entries
            == sum(map(len, worker.holding.spaces.values())) + len(worker.holding.states)
            for worker in workers
        )

    return holds


async def choice(made: Replicas, name: str, asked: Call, *among: str) -> str | None:
    return made.choose(name, await made.request(asked), among)


def test_the_next_turn_goes_where_the_state_of_the_first_is() -> None:
    async def story() -> None:
        workers = [StandIn(name) for name in "abc"]
        async with chosen_by(*workers) as made:
            for worker in workers:
                serve(worker, f"{worker.name}'s session: {'x' * 60}")
            await until(hears_all(made, *workers))
            for worker in workers:
                turn = call(f"{worker.name}'s session: {'x' * 60} and then some more")
                assert await choice(made, worker.name, turn, *"abc") == worker.name

    run(story())


@pytest.mark.parametrize(
    "unknown",
    [call("an image", image_data="..."), Call("POST", "/generate", (), b"{"), Call("POST", "/generate", (), b"[1]")],
)
def test_a_prompt_that_cannot_be_known_is_the_hosts_to_place_and_counts_where_it_went(unknown: Call) -> None:
    async def story() -> None:
        workers = StandIn("a"), StandIn("b")
        async with chosen_by(*workers) as made:
            await until(hears_all(made, *workers))
            assert await choice(made, "1", unknown, "a", "b") is None
            made.sent("1", "b")
            assert [made.dispatcher.num_running(name) for name in "ab"] == [0, 1]
            made.finished("1", "b")
            assert made.dispatcher.num_running("b") == made.num_requests == 0

    run(story())


def test_a_kind_of_prompts_that_one_replica_tokenizes_otherwise_is_the_hosts_to_place() -> None:
    async def story() -> None:
        a, b = workers = StandIn("a"), StandIn("b")
        async with chosen_by(*workers) as made:
            await until(hears_all(made, *workers))
            assert await choice(made, "1", call("x" * 40), "a", "b") is not None
            of_a = {**await said(a), "kinds": [PromptKind.TEXTS, PromptKind.CHATS]}
            made.update({"c": of_a, "d": {**await said(b), "kinds": [PromptKind.CHATS]}, "a": {}, "b": {}})
            assert await choice(made, "2", call("x" * 40), "a", "b") is None

    run(story())


@pytest.mark.parametrize("is_told", [True, False])
def test_where_nobody_is_heard_the_host_chooses(is_told: bool) -> None:
    async def story() -> None:
        mute = StandIn("a", tells=False)
        async with living(mute):
            made = Replicas(ByteReader(), LearnedLatency(FLOPS))
            made.start()
            try:
                made.update({"a": await said(mute) if is_told else {}, "b": {"why_no_events": "it is far away"}})
                assert await choice(made, "1", call("x" * 40), "a", "b") is None
            finally:
                made.close()

    run(story())


@pytest.mark.slow
def test_a_replica_that_falls_silent_is_known_to_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 6.0)

    async def story() -> None:
        a, b = workers = StandIn("a"), StandIn("b")
        async with chosen_by(*workers) as made:
            serve(a, "x" * 80)
            await until(hears_all(made, *workers))
            asked = await made.request(call("x" * 90))
            assert made.choose("1", asked, "ab") == "a"
            made.finished("1", "a")
            assert a.publisher is not None
            await asyncio.to_thread(a.publisher.close)
            a.publisher = None
            await until(lambda: made.choose("2", asked, ["a"]) is None)
            assert made.dispatcher.fleet.index.holding("a").num_entries == 0
            serve(b, "x" * 80)
            await until(lambda: made.dispatcher.fleet.index.holding("b").num_entries > 0)
            assert made.choose("3", asked, "ab") == "b"

    run(story())


def test_a_request_that_the_host_sent_elsewhere_counts_there_and_only_its_own_end_ends_it() -> None:
    async def story() -> None:
        workers = StandIn("a"), StandIn("b")
        async with chosen_by(*workers) as made:
            serve(workers[0], "x" * 80)
            await until(hears_all(made, *workers))
            assert await choice(made, "1", call("x" * 90), *"ab") == "a"
            made.sent("1", "b")
            assert [made.dispatcher.num_running(name) for name in "ab"] == [0, 1]
            made.finished("1", "a")
            assert made.dispatcher.num_running("b") == 1, "a had rejected it"
            made.finished("1", "b")
            assert [made.dispatcher.num_running(name) for name in "ab"] == [0, 0]

    run(story())


def test_a_replica_without_a_prefix_that_another_has_is_asked_for_a_state_at_its_end() -> None:
    async def story() -> None:
        workers = StandIn("a"), StandIn("b")
        async with chosen_by(*workers) as made:
            serve(workers[0], "x" * 80)
            await until(hears_all(made, *workers))
            asked, num_tokens = call("x" * 90), 79 // BLOCK_TOKENS * BLOCK_TOKENS
            assert await choice(made, "elsewhere", asked, "b") == "b"
            assert made.added("elsewhere", asked) == {
                "sampling_params": {"custom_params": {SHARED_ELSEWHERE: num_tokens}}
            }
            assert await choice(made, "at its holder", asked, "a") == "a"
            assert made.added("at its holder", asked) == made.added("unknown", asked) == {}

    run(story())


def test_streams_that_had_nothing_ahead_teach_what_a_prefill_takes() -> None:
    async def story() -> None:
        workers = (StandIn("a"),)
        async with chosen_by(*workers) as made:
            await until(hears_all(made, *workers))
            for number in range(12):
                request = str(number)
                assert await choice(made, request, call(request * (100 + 50 * number), stream=True), "a") == "a"
                made.sent(request, "a")
                made.answered(request)
                made.finished(request, "a")
            assert made.latency.is_known

    run(story())


def test_when_a_model_is_replaced_the_new_replicas_are_heard_once_the_old_are_gone() -> None:
    async def story() -> None:
        old, new = workers = StandIn("old"), StandIn("new", model="another-model")
        async with chosen_by(*workers) as made:
            serve(new, "x" * 80)
            await until(hears_all(made, old))
            assert not made.dispatcher.fleet.index.holding("new").num_entries
            made.update({"new": await said(new)})
            await until(hears_all(made, new))
            assert await choice(made, "1", call("x" * 90), "new") == "new"

    run(story())


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["choose", "went", "answered", "ended", "moved", "update"]),
        st.sampled_from("12345"),
        st.sampled_from(["a", "b", "gone"]),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(STEPS)
def test_whatever_order_a_host_tells_in_no_request_is_counted_twice_or_for_ever(
    steps: list[tuple[str, str, str]],
) -> None:
    async def story() -> None:
        made = Replicas(ByteReader(), LearnedLatency(FLOPS))
        everybody: dict[str, dict[str, Any]] = {name: {} for name in ("a", "b", "gone")}
        made.update(everybody)
        asked = await made.request(call("x" * 50))
        for what, request, name in steps:
            match what:
                case "choose":
                    made.choose(request, asked, [name])
                case "went":
                    made.sent(request, name)
                case "answered":
                    made.answered(request)
                case "ended":
                    made.finished(request, name)
                case "moved":
                    made.finished(request)
                case "update":
                    made.update({each: {} for each in everybody if each != name})
            made.dispatcher.check_invariants()
        made.update(everybody)
        for request in "12345":
            made.finished(request)
        made.dispatcher.check_invariants()
        assert [made.dispatcher.num_running(name) for name in everybody] == [0, 0, 0]
        assert made.num_requests == 0

    run(story())
