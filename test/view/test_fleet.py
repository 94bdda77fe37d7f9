"""`marconi top` shows a router's fleet: its workers, its hit rate, its latest decisions, and who is down, in words."""

import json
from copy import deepcopy
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from marconi import __version__, cli
from marconi.view import fleet

from .test_top import Server, server  # noqa: F401 - a fixture

NOW_S = 7200.0
NO_CACHE = (404, b'{"object": "error", "error": {"message": "GET /marconi: Not Found", "code": 404}}')
UP: dict[str, Any] = {
    "name": "http://[::1]:1",
    "url": "http://[::1]:1",
    "condition": "up",
    "why": "",
    "num_running": 7,
    "work_ahead_s": 0.31,
    "turnover": 0.9,
    "latest": {
        "ttft_s": {"num_requests": 3, "expected": {"mean": 0.42, "median": 0.3}, "seen": {"mean": 9.0, "median": 1.5}},
        "cached_tokens": {
            "num_requests": 2,
            "expected": {"mean": 500.0, "median": 1.0},
            "seen": {"mean": 250.0, "median": 1.0},
            "prompt": {"mean": 1000.0, "median": 1.0},
        },
    },
}
DOWN: dict[str, Any] = {
    "name": "http://b:2",
    "url": "http://b:2",
    "condition": "down",
    "why": "cannot connect",
    "num_running": 0,
    "work_ahead_s": 0.0,
}
STEP = {"num_requests": 1, "num_prompt_tokens": 100, "num_expected_tokens": 60, "num_reported_tokens": 50}
STATE: dict[str, Any] = {
    "time_s": NOW_S,
    "routing": {"rule": "state-aware"},
    "workers": [UP, DOWN],
    "traffic": {
        "step_s": 60,
        "num_steps": 60,
        "steps": [
            {"at_s": 60, **STEP, "num_cached_tokens": 50},
            {"at_s": 7140, **STEP, "num_cached_tokens": 10},
            {"at_s": 7200, **STEP, "num_cached_tokens": 10},
        ],
    },
    "recent": [
        {
            "at_s": NOW_S - number,
            "worker": UP["name"],
            "reason": "longest cached prefix",
            "num_prompt_tokens": 1521,
            "num_hit_tokens": 470,
            "num_cached_tokens": None,
            "status": 200,
        }
        for number in range(fleet.NUM_DECISIONS + 3)
    ],
}


def shown(state: dict[str, Any]) -> list[str]:
    out = StringIO()
    Console(width=160, file=out).print(fleet.page(state))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_a_worker_has_its_hits_of_prompt_tokens_its_work_and_its_first_tokens() -> None:
    assert "http://[::1]:1 up 50.0% 25.0% 300 ms 1.5 s 7 310 ms 90%" in shown(STATE)


def test_a_worker_that_is_down_is_named_with_its_reason_before_the_table() -> None:
    lines = shown(STATE)
    assert lines[1] == "http://b:2 is down: cannot connect"
    assert "http://b:2 down - - - - 0 - -" in lines
    refused = deepcopy(STATE)
    refused["workers"] = [{**DOWN, "condition": "refused", "why": "another model"}]
    assert shown(refused)[1] == "http://b:2 is refused: another model"


def test_the_hit_rate_is_that_of_the_last_hour() -> None:
    said = "routing state-aware: 1 of 2 up; hit rate of the last hour 20.0% seen, 60.0% expected"
    assert shown(STATE)[0] == said, "the step of two hours ago is left out"
    quiet = {**STATE, "traffic": {**STATE["traffic"], "steps": []}}
    assert shown(quiet)[0].endswith("hit rate of the last hour none seen, none expected")


def test_the_latest_decisions_have_their_reasons() -> None:
    lines = [line for line in shown(STATE) if "longest cached prefix" in line]
    assert len(lines) == fleet.NUM_DECISIONS
    assert lines[3] == "3 s http://[::1]:1 longest cached prefix 1,521 470 - 200"


def test_views_show_every_answer() -> None:
    answers = iter([STATE, {**STATE, "workers": []}])
    pauses: list[None] = []
    views = fleet.views(lambda: next(answers), lambda: pauses.append(None))
    next(views)
    assert not pauses
    next(views)
    assert len(pauses) == 1


def test_top_of_a_router_shows_its_fleet_given_its_token(
    server: tuple[type[Server], str],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler, url = server
    handler.answers = NO_CACHE
    handler.beside["/router"] = (200, json.dumps(STATE).encode())
    assert cli.main(["top", url, "--once", "--api-key", "token"]) == 0
    assert "1 of 2 up" in capsys.readouterr().out
    assert set(handler.keys) == {"Bearer token"}


@pytest.mark.parametrize(
    ("code", "body", "says"),
    [
        (401, {"object": "error"}, "URL: --api-key must be the token of that router, got none"),
        (200, {"version": "0.0.1", "workers": []}, f"URL must be a router of version {__version__}, got version 0.0.1"),
    ],
)
def test_top_says_in_one_line_why_it_shows_no_fleet(
    code: int,
    body: dict[str, Any],
    says: str,
    server: tuple[type[Server], str],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler, url = server
    handler.answers = NO_CACHE
    handler.beside["/router"] = (code, json.dumps(body).encode())
    assert cli.main(["top", url, "--once"]) == 2
    assert capsys.readouterr().err == f"marconi: error: {says.replace('URL', url)}\n"
