"""SGLang's own log of its requests, as its logger writes it, is read: prompt, answer, times and what was cached."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from marconi.policy.request import Request, unpack
from marconi.replay.trace import read
from marconi.replay.trace.identity import MAX_ID
from sglang_platform import choose

Line = Mapping[str, Any]


def finished(rid: str, second: float, prompt: object, **more: Any) -> dict[str, Any]:
    obj = {"rid": rid, "text": None, "input_ids": prompt, "image_data": None} | more.pop("obj", {})
    meta = {"id": rid, "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1, "e2e_latency": 0.5}
    out = {"text": "ab", "output_ids": [4, 5], "meta_info": meta} | more.pop("out", {})
    return event("request.finished", second, rid=rid, obj=obj, out=out) | more


def event(name: str, second: float, **fields: Any) -> dict[str, Any]:
    return {"timestamp": f"2026-01-02T03:04:{second:09.6f}", "event": name, **fields}


def write(path: Path, *lines: Line | str, prefix: str = "[2026-01-02 03:04:05] ") -> Path:
    texts = (line if isinstance(line, str) else prefix + json.dumps(line, ensure_ascii=False) for line in lines)
    path.write_text("\n".join(texts) + "\n")
    return path


def requests_of(path: Path, *lines: Line | str, prefix: str = "[x] ") -> tuple[Sequence[Request], list[str]]:
    remarks: list[str] = []
    return read(write(path, *lines, prefix=prefix), on_remark=remarks.append).requests, remarks


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.mark.parametrize("prefix", ["[2026-01-02 03:04:05] ", ""])
def test_prompt_answer_times_and_what_was_cached_are_read(log: Path, prefix: str) -> None:
    lines = [
        event("request.received.openai", 1.0, obj={"messages": [{"role": "user", "content": "a"}]}),
        event("request.received", 1.0, rid="a", obj={"input_ids": [1, 2, 3]}),
        event("request.received", 3.0, rid="b", obj={"input_ids": [1, 2, 3, 4, 5, 6]}),
        finished("b", 4.0, [1, 2, 3, 4, 5, 6], out={"output_ids": [7]}, obj={"cache_salt": "s"}),
        finished("a", 9.0, [1, 2, 3]),
    ]
    (one, other), remarks = requests_of(log, *lines, prefix=prefix)
    assert (unpack(one.path), one.num_prompt_tokens, one.num_output_tokens) == ([1, 2, 3, 4, 5], 3, 2)
    assert (unpack(other.path), other.num_prompt_tokens) == ([1, 2, 3, 4, 5, 6, 7], 6)
    assert (one.arrival_s, other.arrival_s) == (0.0, 2.0)
    assert (one.namespace, other.namespace) == (0, 1) or (one.namespace, other.namespace) == (0, 2)
    assert remarks == ["the server had 2 of 9 prompt tokens (22.2%)"]


def test_a_start_that_the_log_lacks_is_the_end_less_the_latency(log: Path) -> None:
    requests, _ = requests_of(log, finished("a", 2.0, [1, 2, 3]), finished("b", 2.2, [1, 2, 3]))
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 0.2])


def test_texts_are_cut_and_an_answer_without_one_has_its_length(log: Path) -> None:
    requests, remarks = requests_of(
        log,
        finished("a", 2.0, None, obj={"text": "one two"}, out={"text": " three", "output_ids": None}),
        finished("b", 3.0, None, obj={"text": "one two"}, out={"text": None, "output_ids": None}),
    )
    assert [request.num_prompt_tokens for request in requests] == [2, 2]
    assert requests[0].num_output_tokens == 1
    assert unpack(requests[1].path)[2:] == [MAX_ID - 1] * 2
    assert remarks[0].startswith("no tokenizer is given: tokens are estimated")


def test_conversations_are_sessions(log: Path) -> None:
    lines = [finished(str(index), index, [1, 2], obj={"conversation_id": "cd"[index % 2]}) for index in range(1, 4)]
    requests, _ = requests_of(log, *lines, finished("x", 9, [1, 2]))
    assert [(request.session, request.turn) for request in requests] == [(0, 0), (1, 0), (0, 1), (2, 0)]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (finished("b", 2.0, None), "obj must hold input_ids or text, which --log-requests-level 3 logs, got neither"),
        (
            finished("b", 2.0, [1, "...", 2]),
            "obj.input_ids must be whole, which .*level 3 logs, got '...' in its middle",
        ),
        (finished("b", 2.0, [[1], [2]]), "obj.input_ids must be one request's, got those of a batch"),
        (finished("b", 2.0, None, obj={"text": "a" * 1024 + "..." + "b" * 1024}), "obj.text must be whole, "),
        (finished("b", 2.0, [1], out={"output_ids": [1, "...", 2]}), "out.output_ids must be whole, "),
        (finished("b", 2.0, [1], timestamp="soon"), "timestamp must be a number or an ISO 8601 date and time"),
        ('[x] {"event": "request.finished", "obj": {"inp', "not JSON"),
    ],
)
def test_a_line_that_holds_too_little_is_named_and_can_be_skipped(log: Path, line: Line | str, says: str) -> None:
    write(log, finished("a", 1.0, [1, 2]), line)
    with pytest.raises(ValueError, match=f"^{log}, line 2: {says}"):
        read(log)
    reports: list[str] = []
    assert len(read(log, on_bad=reports.append).requests) == 1
    assert len(reports) == 1


def test_what_is_no_request_is_left_out_and_counted(log: Path) -> None:
    lines = [
        "[2026-01-02 03:04:05] The server is fired up and ready to roll!",
        finished("a", 1.0, [1, 2]),
        finished("b", 1.0, [1, 2], out={"meta_info": {"finish_reason": {"type": "abort", "message": "x"}}}),
        event("request.finished", 1.0, rid="c", obj={"text": "a"}, out={"embedding": [0.5], "meta_info": {}}),
        event("request.received", 2.0, rid="d", obj={}),
    ]
    requests, remarks = requests_of(log, *lines)
    assert len(requests) == 1
    assert remarks == [
        "left out, requests of which the log has no end: 1",
        "the server had 1 of 2 prompt tokens (50.0%)",
        f"passed over, a line of the server's other output: 1 record ({log}, line 1)",
        f"left out, an aborted request: 1 record ({log}, line 3)",
        f"left out, an embedding call: 1 record ({log}, line 4)",
    ]


def test_the_lines_are_those_that_the_installed_logger_writes(log: Path) -> None:
    choose()
    logger = pytest.importorskip("sglang.srt.utils.request_logger")
    structs = pytest.importorskip("sglang.srt.managers.io_struct")
    told = logger.RequestLogger(True, 3, "json", [str(log.parent / "logs")])
    asked = structs.GenerateReqInput(input_ids=[1, 2, 3], rid="a", sampling_params={})
    told.log_received_request(asked)
    told.log_finished_request(asked, finished("a", 1.0, [])["out"])
    (request,) = read(log.parent / "logs").requests
    assert (unpack(request.path), request.num_prompt_tokens) == ([1, 2, 3, 4, 5], 3)
