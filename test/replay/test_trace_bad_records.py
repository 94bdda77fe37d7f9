"""A bad record is named with file, line and what is wrong; it is skipped on request and leaves nothing behind."""

import json
from pathlib import Path
from typing import Any

import pytest

from marconi.policy.request import unpack
from marconi.replay.trace import ReadOptions, read

MOONCAKE = {"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}
BAILIAN = {
    "chat_id": 9, "parent_chat_id": -1, "timestamp": 5.0, "input_length": 20, "output_length": 5, "type": "text",
    "turn": 1, "hash_ids": [7, 8],
}  # fmt: skip
ARTIFACT = {
    "session_id": 4, "turn_id": 0, "ts": 5.0, "num_input_tokens": 2, "num_output_tokens": 1, "input_tokens": [7, 8],
    "output_tokens": [9],
}  # fmt: skip
TEXT = {"timestamp": 5, "input": "Hi", "output": "Hello", "session_id": "s"}
GOOD = {"mooncake": MOONCAKE, "bailian": BAILIAN, "artifact": ARTIFACT, "agent-text": TEXT}


def bad(form: str, **changed: Any) -> tuple[str, str]:
    return form, json.dumps(GOOD[form] | changed)


CASES = [
    (*bad("mooncake", input_length=-600), "input_length must be int >= 1, got -600$"),
    (*bad("mooncake", input_length=0, hash_ids=[]), "input_length must be int >= 1, got 0$"),
    (*bad("mooncake", output_length=-1), "output_length must be int >= 0, got -1$"),
    (*bad("mooncake", input_length="600"), "input_length must be int, got '600'$"),
    (*bad("mooncake", input_length=True), "input_length must be int, got True$"),
    (*bad("mooncake", input_length=600.0), "input_length must be int, got 600.0$"),
    (*bad("mooncake", timestamp=float("nan")), r"not JSON \(invalid character \(byte 14\)\)"),
    (*bad("mooncake", timestamp="5"), "timestamp must be float, got '5'$"),
    (*bad("mooncake", timestamp=-5), "timestamp must be float >= 0.0, got -5$"),
    (*bad("mooncake", timestamp=4), "timestamp must be at least 5 as in the record before it, got 4$"),
    (*bad("mooncake", timestamp=10**400), r"timestamp must be in range, got 1000\d+\.\.\.$"),
    (*bad("mooncake", timestamp=1.1e15), r"timestamp must be float <= 1000000000000000.0, got 1100000000000000\.0$"),
    (*bad("mooncake", input_length=10**400), r"input_length must be int <= 16777216, got 1000\d+\.\.\.$"),
    (*bad("mooncake", output_length=10**400), r"output_length must be int <= 16777216, got 1000\d+\.\.\.$"),
    (*bad("mooncake", output_length=2**24 + 1), "output_length must be int <= 16777216, got 16777217$"),
    (
        "mooncake",
        json.dumps(MOONCAKE).replace("600", "6" * 5000),
        "input_length must be in range, got more digits than are read$",
    ),
    (*bad("mooncake", hash_ids=[7]), "hash_ids must hold 2 for 600 tokens in blocks of 512, got 1$"),
    (*bad("mooncake", hash_ids=[7, 8, 9]), "hash_ids must hold 2 for 600 tokens in blocks of 512, got 3$"),
    (*bad("mooncake", hash_ids=[7, -8]), r"hash_ids\[1\] must be int >= 0, got -8$"),
    (*bad("mooncake", hash_ids=[7, "8"]), r"hash_ids\[1\] must be int, got '8'$"),
    (*bad("mooncake", hash_ids=[7, True]), r"hash_ids\[1\] must be int, got True$"),
    (*bad("mooncake", hash_ids=[7, 8.5]), r"hash_ids\[1\] must be int, got 8\.5$"),
    (*bad("mooncake", hash_ids="78"), "hash_ids must be array, got '78'$"),
    (*bad("mooncake", block_tokens=0), "block_tokens must be int >= 1, got 0$"),
    (*bad("mooncake", block_tokens=64), "block_tokens must be 512, got 64$"),
    (*bad("mooncake", block_tokens=512, output_hash_ids=[9]), "output_hash_ids must hold 0, got 1$"),
    (
        "mooncake",
        '{"timestamp": 5, "input_length": 600, "out',
        r"not JSON \(invalid character \(byte 42\)\): cut off or malformed$",
    ),
    ("mooncake", '{"timestamp": 5, "input_length": 600, "output_length": 5}', "hash_ids is missing$"),
    ("mooncake", "[1, 2]", r"the record must be object, got \[1, 2\]$"),
    ("mooncake", "[" * 100_000, "the record must be object, got array$"),
    ("mooncake", '{"more": ' + "[" * 100_000, "not JSON"),
    ("mooncake", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "not JSON"),
    (*bad("bailian"), "chat_id must be new, got 9 again$"),
    (*bad("bailian", chat_id=10, turn=0), "turn must be int >= 1, got 0$"),
    (*bad("bailian", chat_id=10, parent_chat_id=-2), "parent_chat_id must be int >= -1, got -2$"),
    (*bad("bailian", chat_id=10, timestamp=4.5), "timestamp must be at least 5 as in the record before it, got 4.5$"),
    (*bad("bailian", chat_id=10, hash_ids=[1, 2, 3]), "hash_ids must hold 2 for 20 tokens in blocks of 16, got 3$"),
    (*bad("bailian", chat_id=10, parent_chat_id=10), "parent_chat_id must be another than chat_id, got 10 for both$"),
    (*bad("bailian", chat_id=10, parent_chat_id=9), "turn must be above the 1 of chat_id 9, its parent, got 1$"),
    (*bad("bailian", chat_id=10, turn=10**400), r"turn must be int <= 9223372036854775807, got 1000\d+\.\.\.$"),
    (*bad("bailian", chat_id=10, timestamp=1e13), r"timestamp must be float <= 1000000000000\.0, got 1000"),
    (*bad("artifact", turn_id=-1), "turn_id must be int >= 0, got -1$"),
    (*bad("artifact", ts=10**400), r"ts must be in range, got 1000\d+\.\.\.$"),
    (*bad("artifact", input_tokens=[7, 10**400]), r"input_tokens\[1\] must be int <= 4294967295, got 1000\d+\.\.\.$"),
    (*bad("artifact", num_input_tokens=3), "num_input_tokens must be 2 as input_tokens holds, got 3$"),
    (*bad("artifact", num_output_tokens=0), "num_output_tokens must be 1 as output_tokens holds, got 0$"),
    (*bad("artifact", input_tokens=[7, 2**32]), r"input_tokens\[1\] must be int <= 4294967295, got 4294967296$"),
    (*bad("artifact", ts=4.0), "ts must be at least 5 as in the record before it, got 4$"),
    (*bad("artifact", session_id=None), r"session_id must be int \| str, got None$"),
    (*bad("agent-text", input=5), "input must be str, got 5$"),
    (*bad("agent-text", timestamp=10**400), r"timestamp must be int <= 1000000000000000000, got 1000\d+\.\.\.$"),
    (*bad("agent-text", timestamp=1.5), "timestamp must be int, got 1.5$"),
]


@pytest.mark.parametrize(("form", "line", "says"), CASES)
def test_a_bad_line_is_named_and_can_be_skipped(tmp_path: Path, form: str, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    good = GOOD[form]
    path.write_text(f"{json.dumps(good)}\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"^[^\n]*trace\.jsonl, line 3: {says}"):
        read(path)
    reports: list[str] = []
    trace = read(path, on_bad=reports.append)
    assert len(trace.requests) == 1
    assert len(reports) == 1
    assert "trace.jsonl, line 3: " in reports[0]
    assert "\n" not in reports[0]


def test_a_skipped_line_leaves_no_id_and_no_time_behind(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [MOONCAKE, MOONCAKE | {"timestamp": 99, "hash_ids": [70, 80, 90]}, MOONCAKE | {"hash_ids": [7, 11]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    reports: list[str] = []
    trace = read(path, on_bad=reports.append)
    assert [unpack(request.path) for request in trace.requests] == [[0, 1], [0, 2]]
    assert len(reports) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("2023-11-16 18:17:05,5", "a line must have 3 columns, got 2"),
        ("2023-11-16 18:17:05,-5,4", "ContextTokens must be int >= 1, got '-5'"),
        ("2023-11-16 18:17:05,5,x", "GeneratedTokens must be int, got 'x'"),
        ("2023-11-16 18:17:05,5,4.5", "GeneratedTokens must be int, got '4.5'"),
        (
            "2023-11-16 18:17:05,1000000000000000000,4",
            "ContextTokens must be int <= 16777216, got '1000000000000000000'",
        ),
        ("2023-11-16 18:17:05,5,100000000000", "GeneratedTokens must be int <= 16777216, got '100000000000'"),
        (f"2023-11-16 18:17:05,{'9' * 5000},4", "ContextTokens must be in range, got '9999"),
        (f"2023-11-16 18:17:05,{'9' * 150_000},4", "not CSV"),
        ("yesterday,5,4", "TIMESTAMP must be a date and time, got 'yesterday'"),
        (
            "2023-11-16 18:17:02,5,4",
            "TIMESTAMP must be at least 2023-11-16 18:17:03 as in the record before it, got 2023-11-16 18:17:02",
        ),
        ("2023-11-16 18:17:05+00:00,5,4", "TIMESTAMP must have a time zone in all lines or in none, got 2023"),
    ],
)
def test_a_bad_row_is_named_and_can_be_skipped(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "azure.csv"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03,40,4", line, "2023-11-16 18:17:09,5,4"]
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=rf"^[^\n]*azure\.csv, line 3: {says}[^\n]*$"):
        read(path)
    reports: list[str] = []
    assert len(read(path, on_bad=reports.append).requests) == 2
    assert len(reports) == 1


def test_other_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,40\n")
    with pytest.raises(ValueError, match=r"line 1: the columns must be TIMESTAMP,.*, got 'TIMESTAMP,ContextTokens'$"):
        read(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_tokens", 0), ("max_sessions", 0), ("session_rate", 0.0), ("session_rate", float("nan")),
     ("session_rate", 1e-320), ("think_time_s", -1.0), ("seed", -1)],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*, got {value}$"):
        ReadOptions(**{field: value})  # type: ignore[arg-type]


def write_times(path: Path, *times: int) -> Path:
    path.write_text("".join(f"{json.dumps(MOONCAKE | {'timestamp': time})}\n" for time in times))
    return path


@pytest.mark.parametrize(
    ("times", "kept", "reports"),
    [
        ((5, 4), [5], ["line 2: timestamp must be at least 5 as in the record before it, got 4"]),
        ((1, 5, 2, 6), [1, 5, 6], ["line 3: timestamp must be at least 5 as in the record before it, got 2"]),
        # Each is compared with the last good line, so one far too late costs all that come before its time.
        (
            (1, 99, 2, 3),
            [1, 99],
            [
                f"line {line}: timestamp must be at least 99 as in the record before it, got {line - 1}"
                for line in (3, 4)
            ],
        ),
        (
            (1700000000002, 1700000000001),
            [1700000000002],
            ["line 2: timestamp must be at least 1700000000002 as in the record before it, got 1700000000001"],
        ),
    ],
)
def test_each_line_that_goes_back_behind_the_last_good_one_is_skipped(
    tmp_path: Path, times: tuple[int, ...], kept: list[int], reports: list[str]
) -> None:
    path = write_times(tmp_path / "trace.jsonl", *times)
    found: list[str] = []
    requests = read(path, on_bad=found.append).requests
    assert [round(request.arrival_s * 1000) for request in requests] == kept
    assert [report.partition("jsonl, ")[2] for report in found] == reports
    with pytest.raises(ValueError, match=f"{reports[0]}$"):
        read(path)


def test_turns_of_an_artifact_session_must_not_go_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    turns = [("a", 0, 1), ("b", 7, 2), ("a", 9, 3), ("a", 1, 4), ("b", 7, 5), ("a", 2, 6)]
    lines = [ARTIFACT | {"session_id": session, "turn_id": turn, "ts": time} for session, turn, time in turns]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=r"line 4: turn_id must be at least 9 as in the record before it, got 1$"):
        read(path)
    reports: list[str] = []
    requests = read(path, on_bad=reports.append).requests
    assert [(request.session, request.turn) for request in requests] == [(0, 0), (1, 7), (0, 9), (1, 7)]
    assert [report.partition("jsonl, ")[2] for report in reports] == [
        f"line {line}: turn_id must be at least 9 as in the record before it, got {turn}"
        for line, turn in ((4, 1), (6, 2))
    ]


def test_a_child_whose_parent_is_left_out_begins_a_session(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        BAILIAN,
        BAILIAN | {"chat_id": 10, "parent_chat_id": 9, "turn": 2, "timestamp": 4.0},
        BAILIAN | {"chat_id": 11, "parent_chat_id": 10, "turn": 3, "timestamp": 6.0},
        BAILIAN | {"chat_id": 12, "parent_chat_id": 11, "turn": 3, "timestamp": 7.0},
        BAILIAN | {"chat_id": 13, "parent_chat_id": 11, "turn": 4, "timestamp": 8.0},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    reports: list[str] = []
    assert [request.session for request in read(path, on_bad=reports.append).requests] == [0, 1, 1]
    assert [report.partition("jsonl, ")[2][:13] for report in reports] == ["line 2: times", "line 4: turn "]
