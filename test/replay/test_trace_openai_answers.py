"""An answer that the log of an OpenAI-style API lacks is the message with which its conversation continues."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from marconi.policy.request import unpack
from marconi.replay.trace import read
from marconi.replay.trace.identity import MAX_ID

Body = Mapping[str, Any]

USER = {"role": "user", "content": "How far is it?"}
BODY = {"messages": [USER]}
SAID = {"role": "assistant", "content": "Not far."}


def jsonl(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def test_an_answer_that_the_log_lacks_is_taken_from_the_next_messages_of_its_session(log: Path) -> None:
    first, second = BODY, {"messages": [USER, SAID, USER]}
    told = read(jsonl(log, first | {"response": "Not far."}, second)).requests
    for usage in ({}, {"usage": {"completion_tokens": 3}}):
        lacking = read(jsonl(log, first | usage, second)).requests
        assert [request.path for request in lacking] == [request.path for request in told]
        assert [request.num_output_tokens for request in lacking] == [4, 0]


@pytest.mark.parametrize(
    ("later", "why"),
    [
        ([USER, USER], "the next message is no answer"),
        ([USER | {"content": "Another."}, SAID, USER], "another conversation"),
    ],
)
def test_control_an_answer_that_later_messages_do_not_hold_stays_unknown(
    log: Path, later: list[Body], why: str
) -> None:
    first = BODY | {"usage": {"completion_tokens": 500}, "session_id": "a"}
    request, _ = read(jsonl(log, first, {"messages": later, "session_id": "a"})).requests
    assert request.num_output_tokens == 500, why
    assert set(unpack(request.path[request.num_prompt_tokens * 4 :])) == {MAX_ID}, why
