"""`/close_session` on a running server: what the session left is evicted first, and no answer changes."""

from typing import Any

import pytest

from marconi_cpu.demo.server_process import ServerProcess

from .client import HTTP, random_tokens
from .conftest import MARCONI, STRATEGY_ARGS, Launch
from .scenarios import EXTRA_BUFFER

ARGS = (
    *MARCONI,
    "--enable-session-radix-cache",
    "--enable-cache-report",
    "--marconi-eviction",
    "lru",
    "--max-total-tokens",
    "4000",
    "--max-mamba-cache-size",
    "32",
    "--max-running-requests",
    "4",
    *STRATEGY_ARGS[EXTRA_BUFFER],
)
LAUNCHES = (Launch("gdn-sessions", "gdn", ARGS),)
OLDER, NEWER = random_tokens(80_000, 1_000), random_tokens(80_001, 1_000)


def ask(server: ServerProcess, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    """The answer's tokens, and how many prompt tokens came from the cache."""
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, **fields}
    response = HTTP.post(f"{server.url}/generate", json=body, timeout=300.0)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


def close(server: ServerProcess, session_id: str) -> None:
    response = HTTP.post(f"{server.url}/close_session", json={"session_id": session_id}, timeout=60.0)
    assert response.status_code == 200, response.text


def after_pressure(server: ServerProcess, *, closes: str | None) -> dict[str, tuple[list[int], int]]:
    """Two sessions ask and one may be closed; other prompts need the room of one; what the next turns then get."""
    assert HTTP.post(f"{server.url}/flush_cache?timeout=30", timeout=60.0).status_code == 200
    turns = {}
    for name, prompt in ("older", OLDER), ("newer", NEWER):
        answer, num_cached_tokens = ask(server, prompt, session_id=name)
        assert num_cached_tokens == 0
        turns[name] = [*prompt, *answer, *random_tokens(80_002, 20)]
    if closes is not None:
        close(server, closes)
    for seed in (80_003, 80_004, 80_005):
        ask(server, random_tokens(seed, 950))
    # The one that is still there is asked first: its turn needs next to no room.
    order = sorted(turns, key=lambda name: (name == closes) if closes else (name == "older"))
    return {name: ask(server, turns[name], session_id=f"{name} again") for name in order}


@pytest.mark.slow
def test_a_closed_session_makes_room_and_without_closing_the_older_one_does(server: ServerProcess) -> None:
    opened = after_pressure(server, closes=None)
    assert (opened["older"][1], opened["newer"][1] > 1_000) == (0, True), "the control: the rule is LRU"
    closed = after_pressure(server, closes="newer")
    assert (closed["older"][1] > 1_000, closed["newer"][1]) == (True, 0)
    assert {name: answer for name, (answer, _) in closed.items()} == {
        name: answer for name, (answer, _) in opened.items()
    }


@pytest.mark.slow
def test_a_session_may_be_closed_twice_while_it_runs_or_unknown_and_its_name_comes_again(server: ServerProcess) -> None:
    close(server, "never seen")
    prompt = random_tokens(80_010, 300)
    with HTTP.stream(
        "POST",
        f"{server.url}/generate",
        json={
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": 200, "ignore_eos": True},
            "stream": True,
            "session_id": "s",
        },
        timeout=300.0,
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        close(server, "s")
        close(server, "s")
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert ask(server, [*prompt, *random_tokens(80_011, 20)], session_id="s")[1] >= 299, "demoted, and not yet evicted"
    assert HTTP.get(f"{server.url}/health", timeout=60.0).status_code == 200
    assert "Traceback" not in server.log_path.read_text(errors="replace")
