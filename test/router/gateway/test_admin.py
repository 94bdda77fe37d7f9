"""What an operator sees is what happened."""

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import zmq.auth
from prometheus_client.parser import text_string_to_metric_families

from marconi.events.address import Keys
from marconi.router.gateway.app import ROUTER
from marconi.router.gateway.upstream import num_cached_tokens
from marconi.router.routing import STATE_AWARE
from marconi.router.subscriber import Dropped

from .house import house, until
from .stand_in import Fault, StandIn


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_metrics_count_what_was_asked_answered_and_failed() -> None:
    async def story() -> None:
        bad, good = StandIn("a"), StandIn("b")
        async with house(bad, good) as home:
            for number in range(8):
                await home.ask(f"{number}")
            bad.fault = Fault.REFUSES
            await home.post("/generate", b"{")
            while not (await home.state())["recent"][0]["failures"]:
                number += 1
                await home.ask(f"{number}")
            await home.until_told(bad, good)
            number = len((await home.state())["recent"])
            told = samples((await home.get("/metrics")).body)
            answered = {key[1:]: value for key, value in told.items() if key[0] == "marconi_router_requests_total"}
            assert set(answered) == {("/generate", "200"), ("/generate", "400")}
            assert sum(answered.values()) == number
            assert told["marconi_router_failed_attempts_total", bad.url] == 1
            decisions = sum(value for key, value in told.items() if key[0] == "marconi_router_decisions_total")
            assert decisions == answered["/generate", "200"] + 1
            assert told["marconi_router_worker_up", good.url] == 1
            held = sum(map(len, good.holding.spaces.values())) + len(good.holding.states)
            assert told["marconi_router_worker_entries", good.url] == held
            assert told["marconi_router_ttft_seconds_count",] == answered["/generate", "200"]

    run(story())


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_a_worker_had_is_counted_beside_what_it_should_have_had(is_stream: bool) -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            for _ in range(3):
                body = json.dumps({"text": "the same words again and again", "stream": is_stream}).encode()
                assert (await home.post("/generate", body)).status == 200
                await home.until_told(worker)
            records = (await home.state())["recent"]
            assert [record["num_cached_tokens"] for record in records] == [24, 24, 0]
            told = samples((await home.get("/metrics")).body)
            assert told["marconi_router_expected_tokens_total", worker.url] == 48
            assert told["marconi_router_cached_tokens_total", worker.url] == 48
            latest = (await home.state())["workers"][0]["latest"]
            assert latest["cached_tokens"] == {
                "num_requests": 3,
                "expected": {"mean": 16.0, "median": 24.0},
                "seen": {"mean": 16.0, "median": 24.0},
                "prompt": {"mean": 30.0, "median": 30.0},
            }
            state = await home.state()
            traffic = state["traffic"]
            sums = {name: sum(step[name] for step in traffic["steps"]) for name in traffic["steps"][0]}
            assert (sums["num_requests"], sums["num_prompt_tokens"], sums["num_reported_tokens"]) == (3, 90, 90)
            assert (sums["num_expected_tokens"], sums["num_cached_tokens"]) == (48, 48)
            age_s = state["time_s"] - traffic["steps"][-1]["at_s"]
            assert 0 <= age_s < 2 * traffic["step_s"]
            fates = home.gateway.dispatcher.fleet.guesses.fates
            assert fates["made"] == 1, "of what its worker holds already none is made"
            assert {fate: told["marconi_router_guesses_total", fate] for fate in fates} == fates

    run(story())


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (b'data: {"text": "x", "meta_info": {"cached_tokens": 7}}', 7),
        (b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}', 8),
        (b'{"text": "he says \\"cached_tokens\\": 5"}', None),
        (b'{"usage": {"prompt_tokens": 9}}', None),
        (b'data: {"meta_info": {"cached_tokens": 12', None),
    ],
)
def test_what_a_worker_had_is_read_of_its_answer_and_not_of_a_text(answer: bytes, number: int | None) -> None:
    assert num_cached_tokens(answer) == number


def test_a_streams_first_token_is_shown_beside_when_it_was_expected() -> None:
    async def story() -> None:
        worker, other = StandIn("a"), StandIn("b")
        async with house(worker, other, routing="round-robin") as home:
            for number in range(4):
                await home.ask(f"{number}", stream=True)
            await home.ask("whole")
            told = samples((await home.get("/metrics")).body)
            recent = (await home.state())["recent"]
            for rank in (await home.state())["workers"]:
                streams = [each for each in recent[1:] if each["worker"] == rank["name"]]
                latest = rank["latest"]["ttft_s"]
                assert latest["num_requests"] == len(streams) == 2
                expected_s = sum(each["expected_ttft_s"] for each in streams)
                assert latest["expected"]["mean"] == pytest.approx(expected_s / 2, abs=1e-5)
                assert 0 < latest["seen"]["mean"] <= sum(each["ttft_s"] for each in streams)
                for name, which in (("worker_expected_ttft", "expected"), ("worker_ttft", "seen")):
                    assert told[f"marconi_router_{name}_seconds_count", rank["name"]] == 2
                    total_s = told[f"marconi_router_{name}_seconds_sum", rank["name"]]
                    assert total_s == pytest.approx(2 * latest[which]["mean"], abs=1e-5)
                assert (rank["limit"], rank["turnover"], rank["pace"]) == (None, 0.0, 1.0)
                assert ("marconi_router_worker_limit", rank["name"]) not in told
                load = home.gateway.dispatcher.load(rank["name"], time.monotonic())
                assert rank["held_s"] == pytest.approx(load.held.mean_s(time.monotonic()), abs=1e-3)
                load.limit = 3
            told = samples((await home.get("/metrics")).body)
            for rank in (await home.state())["workers"]:
                assert rank["limit"] == told["marconi_router_worker_limit", rank["name"]] == 3

    run(story())


def test_what_was_seen_of_a_worker_is_forgotten_with_it() -> None:
    async def story() -> None:
        worker, other = StandIn("a"), StandIn("b")
        async with house(worker, other) as home:
            for number in range(4):
                await home.ask(f"{number}", stream=True)
            home.gateway.remove(other.url)
            assert list(home.gateway.placed) == [worker.url]

    run(story())


def test_health_checks_by_the_router_or_of_it_are_no_requests() -> None:
    async def story() -> None:
        async with house(StandIn("a")) as home:
            for path in ("/health", "/health_generate"):
                assert (await home.get(path)).status == 200
            (worker,) = home.gateway.workers.values()
            before = worker.health.num_checks
            await home.app[ROUTER].checks.check(worker)
            assert worker.health.num_checks > before
            for num_requests in (0, 1):
                told = samples((await home.get("/metrics")).body)
                counts = {
                    name: sum(value for key, value in told.items() if key[0] == f"marconi_router_{name}")
                    for name in ("requests_total", "decisions_total", "ttft_seconds_count", "to_dispatch_seconds_count")
                }
                assert set(counts.values()) == {num_requests}
                assert told["marconi_router_health_checks_total", "200"] == 2
                assert told["marconi_router_worker_health_checks_total", worker.url] > before
                assert len((await home.state())["recent"]) == num_requests
                await home.ask("hello")

    run(story())


def test_what_only_grows_is_a_counter_by_name_and_by_type() -> None:
    async def story() -> None:
        async with house(StandIn("a")) as home:
            await home.ask("hello")
            text = (await home.get("/metrics")).body.decode()
            types = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE "))
            assert {name for name, kind in types.items() if kind == "gauge" and not name.endswith("_created")} == {
                f"marconi_router_{name}"
                for name in (
                    *("index_blocks", "index_guesses", "connections"),
                    *("worker_up", "worker_running", "worker_work_ahead_seconds", "worker_entries"),
                    *("worker_held_seconds", "worker_turnover", "worker_pace", "worker_limit"),
                )
            }
            assert all(name.endswith("_total") for name, kind in types.items() if kind == "counter")
            home.gateway.feed.subscriber.stats.dropped[Dropped.MALFORMED] = 1
            assert 'event_messages_dropped_total{why="' in (await home.get("/metrics")).body.decode()

    run(story())


def test_the_state_tells_the_rule_and_its_parameters() -> None:
    async def story(routing: str) -> Any:
        async with house(StandIn("a"), routing=routing) as home:
            return (await home.state())["routing"]

    assert asyncio.run(story("state-aware")) == {
        "rule": "state-aware",
        **asdict(STATE_AWARE),
        "asks_for_states": True,
    }
    assert asyncio.run(story("sticky-hash")) == {"rule": "sticky-hash", "max_load": 1.25}


def test_the_state_tells_of_each_request_and_forgets_the_oldest() -> None:
    async def story() -> None:
        async with house(StandIn("a"), num_recent=3) as home:
            for number in range(5):
                await home.ask("z" * (10 + number), stream=number % 2 == 0)
            recent = (await home.state())["recent"]
            assert [each["num_prompt_tokens"] for each in recent] == [14, 13, 12]
            assert all(each["status"] == 200 and each["ttft_s"] > 0 and each["num_attempts"] == 1 for each in recent)

    run(story())


def test_events_between_hosts_come_by_the_fleets_keys(tmp_path: Path) -> None:
    zmq.auth.create_certificates(tmp_path, "fleet")
    zmq.auth.create_certificates(tmp_path, "other")
    keys, others = (Keys.read(tmp_path / f"{name}.key_secret") for name in ("fleet", "other"))

    async def story(own: Keys | None) -> tuple[str, int]:
        worker = StandIn("a", keys=keys)
        async with house(worker, keys=own, waits=False) as home:
            await until(lambda: home.gateway.workers[worker.url].health.why != "not checked yet")
            why = home.gateway.workers[worker.url].health.why
            index = home.gateway.dispatcher.fleet.index

            def num_known() -> int:
                return index.holding(worker.url).num_entries if worker.url in index.workers else 0

            if not why:
                await home.ask("x" * 40)
                # What is to come may take its time; of what is not to come half a second shows as much as an hour.
                await (until(lambda: num_known() == 5) if own is keys else asyncio.sleep(0.5))
            return why, num_known()

    assert asyncio.run(story(keys)) == ("", 5)
    assert asyncio.run(story(others)) == ("", 0), "a worker with other keys receives nothing"
    why, _ = asyncio.run(story(None))
    assert why.endswith(": --events-keys must be given for its events, got none")
