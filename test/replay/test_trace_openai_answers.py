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
        ([USER, SAID, USER], "a longer answer was reasoning that the client dropped"),
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


def answer(**message: Any) -> Body:
    return {"choices": [{"message": {"role": "assistant", **message}}], "usage": {"completion_tokens": 40}}


def test_reasoning_is_read_by_either_name(log: Path) -> None:
    names = ("reasoning", "reasoning_content")
    ((one,), (other,)) = (
        read(jsonl(log, BODY | {"response": answer(content="Not far.", **{name: "a b c"})})).requests for name in names
    )
    assert one.path == other.path
    assert one.num_output_tokens > 4


@pytest.mark.parametrize("arguments", ['{"city": "Ber', '{"days": [1, 2'])
def test_an_answer_that_is_cut_off_inside_a_call_counts_as_long_as_it_was(log: Path, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    cut, whole = (
        {"response": answer(content=None, tool_calls=[call | {"function": {"name": "f", "arguments": text}}])}
        for text in (arguments, "{}")
    )
    (request,) = read(jsonl(log, BODY | cut)).requests
    assert request.num_output_tokens == 40
    assert set(unpack(request.path[request.num_prompt_tokens * 4 :])) == {MAX_ID}
    (control,) = read(jsonl(log, BODY | whole)).requests
    assert control.num_output_tokens != 40, "a whole call is read as it is"


@pytest.mark.parametrize(
    ("line", "remark"),
    [
        ({"status": "failure", "response": {}}, "calls that failed are left out: 1"),
        ({"error_str": "429", "response": {}}, "calls that failed are left out: 1"),
        ({"response": {"status_code": 500, "body": {}}}, "calls that failed are left out: 1"),
        ({"call_type": "aembedding"}, "calls for embeddings are left out: 1"),
    ],
)
def test_a_call_of_which_no_server_kept_anything_is_left_out_and_counted(log: Path, line: Body, remark: str) -> None:
    remarks: list[str] = []
    lines = BODY | line, BODY | {"status": "success", "response": "Not far."}
    assert len(read(jsonl(log, *lines), on_remark=remarks.append).requests) == 1
    assert remark in remarks


@pytest.mark.parametrize("system", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_anthropic_s_system_prompt_and_blocks_are_those_of_openai_s_messages(log: Path, system: object) -> None:
    blocks = {"content": [{"type": "text", "text": "Not far."}], "usage": {"input_tokens": 9, "output_tokens": 3}}
    (anthropic,) = read(jsonl(log, BODY | {"system": system, "response": blocks})).requests
    (openai,) = read(
        jsonl(log, {"messages": [{"role": "system", "content": "Be brief."}, USER], "response": "Not far."})
    ).requests
    assert anthropic.path == openai.path
    assert anthropic.num_output_tokens == openai.num_output_tokens > 0


def test_a_record_over_several_lines_is_said_to_be_one(log: Path) -> None:
    log.write_text(json.dumps(BODY, indent=1))
    with pytest.raises(ValueError, match="JSON must be one object a line"):
        read(log, format="openai")
