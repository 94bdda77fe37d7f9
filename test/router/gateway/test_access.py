"""Who reaches what: the administrator's pages need a token, and tenants share nothing."""

import argparse
import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marconi.router.command import add_parser
from marconi.router.gateway.access import salted
from marconi.router.gateway.settings import Settings
from marconi.router.routing import Reason

from .house import house
from .stand_in import StandIn

TOKEN = "0123456789abcdef"  # noqa: S105


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def test_a_page_in_a_browser_cannot_change_the_fleet() -> None:
    async def story() -> None:
        async with house(StandIn("a")) as home:
            simple = {"Content-Type": "text/plain"}
            answer = await home.post("/router/workers", {"url": "http://127.0.0.1:9"}, simple)
            assert (answer.status, len(home.gateway.workers)) == (400, 1)
            assert "Content-Type must be application/json" in answer.message

    run(story())


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_what_a_worker_was_started_with_is_the_administrators(path: str) -> None:
    async def story(token: str | None) -> int:
        async with house(StandIn("a"), token=token) as home:
            return (await home.get(path)).status

    assert asyncio.run(story(TOKEN)) == 401
    assert asyncio.run(story(None)) == 404, "passed on, to a stand-in that has none"


@pytest.mark.parametrize("path", ["/router", "/metrics"])
def test_the_administrators_pages_need_the_token_where_there_is_one(path: str) -> None:
    async def story() -> None:
        async with house(StandIn("a"), token=TOKEN) as home:
            for wrong in (
                {},
                {"Authorization": TOKEN},
                {"Authorization": f"Bearer {TOKEN[:-1]}"},
                {"Authorization": f"Basic {TOKEN}"},
                {"Authorization": "Bearer \xff"},
            ):
                assert (await home.get(path, wrong)).status == 401
            assert (await home.get(path, {"Authorization": f"Bearer {TOKEN}"})).status == 200
            assert (await home.ask("hello")).status == 200, "users need none"
            refused = await home.post("/router/workers", {"url": "http://127.0.0.1:9"})
            assert refused.status == 401
            assert len(home.gateway.workers) == 1

    run(story())


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "example.org"])  # noqa: S104
def test_a_router_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ValueError, match=f"--host must be .* or --token-file given, got {host}"):
        Settings(host=host)
    assert Settings(host=host, token=TOKEN).token == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.3.2.1"])
def test_a_router_on_loopback_needs_none(host: str) -> None:
    assert Settings(host=host).token is None


def test_a_token_is_never_shown() -> None:
    assert TOKEN not in repr(Settings(token=TOKEN, worker_api_key=TOKEN))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token": "short"}, "must have 16 characters or more, got 5"),
        ({"port": 70000}, "--port must be 1 to 65535, .* got 70000"),
        ({"max_body_bytes": 0}, "--max-body-bytes must be above 0, got 0"),
        ({"first_byte_timeout_s": float("nan")}, "--first-byte-timeout-s must be above 0, got nan"),
        ({"max_connections": 0}, "--max-connections must be above 0, got 0"),
        ({"tenant_header": "bad header"}, "--tenant-header must be a header's name like X-Tenant, got 'bad header'"),
        ({"tenant_header": ""}, "--tenant-header must be a header's name like X-Tenant, got ''"),
        (
            {"session_header": "X-S\u00e9ance"},
            "--session-header must be a header's name like X-Tenant, got 'X-S\u00e9ance'",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Settings(**options)


def test_the_command_line_says_what_limits_are_by_default_and_takes_others(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    given = parser.parse_args(
        ["router", "--workers", "w", "--model", "m", "--max-attempts", "5", "--idle-timeout-s", "0.5"]
    )
    assert (given.max_attempts, given.idle_timeout_s, given.max_body_bytes) == (5, 0.5, None)
    with pytest.raises(SystemExit):
        parser.parse_args(["router", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--max-body-bytes N of a request's body (default: 33554432)" in shown
    assert "--snapshot-period-s N seconds between two snapshots of a worker (default: 5)" in shown


def test_tenants_never_hit_what_another_asked_and_their_requests_do_not_follow_each_other() -> None:
    async def story(tenant_header: str | None) -> list[int]:
        worker = StandIn("a")
        async with house(worker, tenant_header=tenant_header) as home:
            text = "the same long prompt of both, word for word"
            for tenant in ("red", "blue", "red"):
                answer = await home.post("/generate", {"text": text}, {"X-Tenant": tenant})
                assert answer.status == 200
                await home.until_told(worker)
            recent = (await home.state())["recent"]
            assert [each["num_hit_tokens"] for each in reversed(recent)] == worker.num_hit_tokens
            return worker.num_hit_tokens

    assert asyncio.run(story("X-Tenant")) == [0, 0, 40]
    assert asyncio.run(story(None)) == [0, 40, 40], "the control: without tenants the second one hits"


def test_a_prompt_cache_key_is_read_within_its_tenant_and_opens_no_other() -> None:
    async def story() -> None:
        workers = StandIn("a"), StandIn("b")
        async with house(*workers, tenant_header="X-Tenant") as home:

            async def ask(tenant: str, text: str) -> dict[str, Any]:
                body = {"text": text, "prompt_cache_key": "app"}
                assert (await home.post("/generate", body, {"X-Tenant": tenant})).status == 200
                await home.until_told(*workers)
                recent: dict[str, Any] = (await home.state())["recent"][0]
                return recent

            text = "the same long prompt of both, word for word"
            first, second = await ask("red", text), await ask("blue", text)
            assert (second["reason"], second["num_hit_tokens"]) == (Reason.COLD, 0)
            third = await ask("red", f"Not {text}")
            assert (third["reason"], third["worker"], third["num_hit_tokens"]) == (Reason.AKIN, first["worker"], 0)
            assert (await ask("red", text))["num_hit_tokens"] == 40, "the control"

    asyncio.run(story())


def test_requests_without_one_tenant_are_refused() -> None:
    async def story() -> None:
        worker = StandIn("a")
        async with house(worker, tenant_header="X-Tenant") as home:
            for headers in ({}, {"X-Tenant": " "}, {"X-Tenant": "x" * 300}):
                answer = await home.post("/generate", {"text": "hello"}, headers)
                assert answer.status == 400
                assert answer.message.startswith("X-Tenant must be one header")
            refused = await home.post("/generate", {"text": "x", "session_params": {"id": "1"}}, {"X-Tenant": "red"})
            assert (refused.status, refused.message.partition(":")[0]) == (400, "session_params")
            assert not worker.asked

    run(story())


names = st.text(max_size=8)


@given(names, names, st.none() | names, st.none() | names)
def test_salts_are_equal_only_of_one_tenant_and_one_salt(
    tenant: str, other: str, own: str | None, others: str | None
) -> None:
    def salt(name: str, given: str | None) -> Any:
        return salted({"text": "x", "cache_salt": given}, name)["cache_salt"]

    same = tenant == other and (own or "") == (others or "")
    assert (salt(tenant, own) == salt(other, others)) == same


def test_each_prompt_of_a_batch_is_salted_and_nothing_else_is_touched() -> None:
    body = {"text": ["x", "y"], "cache_salt": ["1", None], "stream": True}
    one, two = salted(body, "red")["cache_salt"]
    assert one != two
    assert {**salted(body, "red"), "cache_salt": body["cache_salt"]} == body
    assert body["cache_salt"] == ["1", None]
    for wrong in (3, {"a": 1}, [3]):
        with pytest.raises(ValueError, match="must be a string, got a "):
            salted({"cache_salt": wrong}, "red")
