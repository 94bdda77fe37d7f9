"""A server with two data-parallel ranks behind one address: each turn goes to the rank that holds its conversation."""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP
from .conftest import StartServer, server_args
from .processes import free_ports
from .routers import Router, greedy, running
from .scenarios import EXTRA_BUFFER
from .scrapes import NOT_EVERYWHERE, all_unanswered, scraped, unanswered

pytestmark = pytest.mark.slow

SHARED_TOKENS = 8
"""At most so many come before a chat's own words."""
RANKS = {
    "replicas": ("--dp-size", "2"),
    "attention": ("--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"),
}


@pytest.fixture(scope="module", params=RANKS)
def server(request: pytest.FixtureRequest, models: dict[str, Path], start_server: StartServer) -> ServerProcess:
    events = ("--marconi-events", f"tcp://127.0.0.1:{free_ports(4)}")
    reports = ("--enable-cache-report", "--enable-metrics")
    return start_server(models["gdn"], [*server_args(EXTRA_BUFFER), *reports, *events, *RANKS[request.param]])


@pytest.fixture(scope="module")
def router(
    server: ServerProcess, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Router]:
    with running((server,), models["gdn"], tmp_path_factory.mktemp("router") / "log") as made:
        yield made


def body_of(route: str, turns: Sequence[str]) -> dict[str, Any]:
    """The body of a conversation's latest turn."""
    if route == "/generate":
        return {"text": " ".join(turns), "sampling_params": greedy()}
    said = [{"role": role, "content": turn} for turn in turns for role in ("user", "assistant")]
    prompt = {"prompt": " ".join(turns)} if route == "/v1/completions" else {"messages": said[:-1]}
    return {**prompt, "model": "x", "max_tokens": 4, "temperature": 0}


def ask(url: str, route: str, turns: Sequence[str], **more: Any) -> int:
    """Cached tokens of the answer."""
    answer = HTTP.post(url + route, json={**body_of(route, turns), **more}, timeout=120.0)
    answer.raise_for_status()
    told = answer.json()
    if route == "/generate":
        return int(told["meta_info"]["cached_tokens"])
    return int((told["usage"]["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"])


def conversation(name: str) -> list[str]:
    return [f"{name}: " + "what was said before. " * 12]


@pytest.mark.parametrize("route", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_the_next_turn_goes_to_the_rank_that_holds_the_conversation(router: Router, route: str) -> None:
    """Two conversations on two ranks. The control: on the other rank, or on any, the same turn finds nothing."""
    (server,) = router.workers
    space = {"cache_salt": route}
    talks = [conversation(f"{name} of {route}") for name in ("One", "Another")]
    homes = []
    for turns in talks:
        assert ask(router.url, route, turns, **space) == 0
        homes.append(router.latest()["worker"])
    assert set(homes) == {f"{server.url}/{rank}" for rank in range(2)}
    for turn in ("And then?", "And now?"):
        for turns, home in zip(talks, homes, strict=True):
            num_before = len(" ".join(turns))
            turns.append(turn)
            cached = ask(router.url, route, turns, **space)
            assert router.latest()["worker"] == home
            assert cached >= num_before - 1
    other = 1 - int(homes[0][-1])
    by_name = [ask(server.url, route, [*talks[0], "Or?"], routed_dp_rank=rank, **space) for rank in range(2)]
    assert by_name[other] <= SHARED_TOKENS < num_before <= by_name[1 - other]
    # SGLang takes its ranks in turn.
    alone = conversation(f"Without a rank, {route}")
    by_turns = [ask(server.url, route, [*alone, *["More?"] * turn], **space) for turn in range(3)]
    assert by_turns[1] <= SHARED_TOKENS < len(alone[0]) <= by_turns[2] + 1


def test_a_router_that_comes_later_knows_each_rank_by_its_events(
    router: Router, models: dict[str, Path], tmp_path: Path
) -> None:
    (server,) = router.workers
    talks = [conversation(f"{name}, held by a rank") for name in ("One", "Another")]
    for rank, turns in enumerate(talks):
        ask(server.url, "/generate", turns, routed_dp_rank=rank)
    with running(router.workers, models["gdn"], tmp_path / "log") as later:
        later.until(lambda state: all(rank["events"]["num_entries"] for rank in state["workers"]))
        for rank, turns in enumerate(talks):
            cached = ask(later.url, "/generate", [*turns, "And then?"])
            promised = later.latest()
            assert (promised["worker"], promised["num_hit_tokens"]) == (f"{server.url}/{rank}", cached)
            assert cached >= len(turns[0]) - 1


def test_a_client_that_asks_for_a_rank_gets_it(router: Router) -> None:
    (server,) = router.workers
    turns = conversation("What a client wishes")
    for rank, is_held in ((1, False), (0, False), (1, True), (0, True)):
        cached = ask(router.url, "/generate", [*turns, "And then?"] if is_held else turns, routed_dp_rank=rank)
        promised = router.latest()
        assert promised["worker"] == f"{server.url}/{rank}"
        assert (promised["num_hit_tokens"] > 0, cached > 0) == (is_held, is_held)
    refused = router.post("/generate", {**body_of("/generate", turns), "routed_dp_rank": 2})
    assert (refused.status_code, refused.json()["error"]["message"].rpartition(", ")[2]) == (400, "got 2")


def told(server: ServerProcess) -> list[dict[str, Any]]:
    ranks: list[dict[str, Any]] = HTTP.get(f"{server.url}/marconi", timeout=60.0).json()["ranks"]
    return ranks


def test_status_metrics_events_and_log_name_each_rank_once(server: ServerProcess) -> None:
    for number in range(4):
        ask(server.url, "/generate", [f"{number}"], routed_dp_rank=int(number > 0))
    assert all([each["dp_rank"] for each in told(server)] == [0, 1] for _ in range(5))
    assert [each["events"]["worker"].rpartition("/")[2] for each in told(server)] == ["0", "1"]
    give_up_s = time.monotonic() + 30
    while (shown := prompt_tokens(server)) != {each["dp_rank"]: each["num_prompt_tokens"] for each in told(server)}:
        assert time.monotonic() < give_up_s, shown
        time.sleep(0.5)
    assert shown[1] > 0
    log = server.log_path.read_text(errors="replace")
    assert sorted(re.findall(r"DP(\d)[^]]*\] marconi: publishes events on .* as \S+/(\d),", log)) == [
        ("0", "0"),
        ("1", "1"),
    ]


def test_every_query_of_the_board_the_alerts_and_the_pages_finds_what_a_worker_and_a_router_tell(
    server: ServerProcess, router: Router
) -> None:
    """And one that names a metric, a label or a value that neither has finds nothing."""
    for _ in range(2):
        ask(router.url, "/generate", conversation("For the metrics"))
    give_up_s = time.monotonic() + 30
    while missing := all_unanswered(series := scraped(server.url, router.url), is_everywhere):
        assert time.monotonic() < give_up_s, missing
        time.sleep(0.5)
    for wrong in (
        "rate(marconi_hit_tokens[5m])",
        "sum by (cause) (marconi_requests_total)",
        'marconi_router_decisions_total{reason="lucky"}',
    ):
        assert unanswered(wrong, series, is_everywhere), wrong


def is_everywhere(metric: str) -> bool:
    return metric not in NOT_EVERYWHERE


def prompt_tokens(server: ServerProcess) -> dict[int, int]:
    """By the label of a rank; one for each."""
    text = HTTP.get(f"{server.url}/metrics", timeout=60.0).text
    found = re.findall(r"^marconi_prompt_tokens_total{.*dp_rank=\"(\d)\".*} (\S+)$", text, re.MULTILINE)
    assert len(dict(found)) == len(found)
    return {int(rank): int(float(count)) for rank, count in found}
