"""What cannot be answered is refused in one line, and asks no worker."""

import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest

from .house import house
from .stand_in import StandIn


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "must be JSON: "),
        (b"{", 400, "must be JSON: "),
        (b"\xff\xfe", 400, "must be JSON: "),
        (b"[" * 100_000, 400, "must be JSON: "),
        (b"[1]", 400, "must be a JSON object, got a list"),
        (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "must be JSON: "),
        (b'{"text": ' + b"9" * 9000 + b"}", 400, "must be JSON: "),
        (b'{"text": "\xff"}', 400, "must be JSON: "),
        (b'{"text": "' + b"x" * 2000 + b'"}', 400, "at most 1000 tokens, got 2000"),
        (b" " * 10_001, 413, "at most 10000 bytes"),
    ],
)
def test_bad_bodies_get_a_line_and_no_worker(body: bytes, status: int, words: str) -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker, max_body_bytes=10_000, max_prompt_tokens=1000) as home:
            if len(body) > 50_000:
                home.app._client_max_size = 1 << 20
            answer = await home.post("/generate", body)
            assert answer.status == status
            assert words in answer.message
            assert "\n" not in answer.message
            assert not worker.asked
            assert (await home.ask("still there")).status == 200

    run(story())


@pytest.mark.parametrize(
    "body",
    [b'{"text": NaN}', b'{"text": "\\ud800"}', b'{"text": 3}', b'{"text": ""}', b"{}"],
)
def test_what_only_a_worker_can_judge_is_its_own_to_refuse_and_counts_for_nothing(body: bytes) -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker) as home:
            answer = await home.post("/generate", body)
            assert len(worker.asked) == 1
            assert (answer.status, answer.json) == (400, {"error": {"message": "a takes texts"}})
            dispatcher = home.gateway.dispatcher
            assert dispatcher.affinity.warm_tokens(worker.url, 0.0) == dispatcher.num_running(worker.url) == 0
            assert (await home.ask("still there")).status == 200

    run(story())


@pytest.mark.parametrize("tenant_header", [None, "X-Tenant"])
def test_a_body_that_can_just_be_read_and_not_written_again_is_answered_too(tenant_header: str | None) -> None:
    async def story() -> None:
        async with house(StandIn("a"), tenant_header=tenant_header) as home:
            for depth in (*range(100, 900, 100), *range(900, 1000, 4)):
                body = b'{"text": "x", "more": ' + b"[" * depth + b"]" * depth + b"}"
                assert (await home.post("/generate", body, {"X-Tenant": "red"})).status in (200, 400)
                body = b'{"text": "x", "image_data": true, "prompt": ' + b"[" * depth + b"]" * depth + b"}"
                assert (await home.post("/generate", body, {"X-Tenant": "red"})).status in (200, 400)

    run(story())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/generate", 405), ("POST", "/flush_cache", 404), ("POST", "/update_weights_from_disk", 404)],
)
def test_what_is_not_offered_is_said_in_a_line(method: str, path: str, status: int) -> None:
    async def story() -> None:
        async with house(StandIn("a")) as home, home.client.request(method, home.url + path) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"].startswith(f"{method} {path}: ")

    run(story())


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker, body_timeout_s=0.2) as home:
            at = urlsplit(home.url)
            reader, writer = await asyncio.open_connection(at.hostname, at.port)
            writer.write(b"POST /generate HTTP/1.1\r\nHost: r\r\nContent-Length: 100\r\n\r\n{")
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            assert b"the body must come in within 0.2 s" in await reader.readuntil(b"}}")
            writer.close()
            assert not worker.asked
            assert (await home.ask("still there")).status == 200

    run(story())


def test_a_header_that_is_too_large_is_refused() -> None:
    async def story() -> None:
        async with house(StandIn("a")) as home:
            answer = await home.post("/generate", {"text": "x"}, {"X-Long": "y" * 20_000})
            assert answer.status == 400
            assert (await home.ask("still there")).status == 200

    run(story())
