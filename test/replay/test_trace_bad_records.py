"""A bad record is named with file, line and what is wrong; it is skipped on request and leaves nothing behind."""

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from marconi.policy.request import unpack
from marconi.replay.trace import ReadOptions, read
from marconi.replay.trace.order import longest_in_order

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
    (*bad("mooncake", input_length=-600), "input_length is -600, must be at least 1"),
    (*bad("mooncake", input_length=0, hash_ids=[]), "input_length is 0, must be at least 1"),
    (*bad("mooncake", output_length=-1), "output_length is -1, must be at least 0"),
    (*bad("mooncake", input_length="600"), "input_length is '600', must be a whole number"),
    (*bad("mooncake", input_length=True), "input_length is True, must be a whole number"),
    (*bad("mooncake", input_length=600.0), "input_length is 600.0, must be a whole number"),
    (*bad("mooncake", timestamp=float("nan")), "timestamp is nan, must be a number"),
    (*bad("mooncake", timestamp="5"), "timestamp is '5', must be a number"),
    (*bad("mooncake", timestamp=-5), "timestamp is -5, must be at least 0"),
    (*bad("mooncake", timestamp=4), "timestamp 4 ms is earlier than 5 ms before it"),
    (*bad("mooncake", timestamp=10**400), r"timestamp is 1000\d+\.\.\., must be at most 1e\+15"),
    (*bad("mooncake", timestamp=1.1e15), r"timestamp is 1100000000000000\.0, must be at most 1e\+15"),
    (*bad("mooncake", input_length=10**400), r"input_length is 1000\d+\.\.\., must be at most 16777216"),
    (*bad("mooncake", output_length=10**400), r"output_length is 1000\d+\.\.\., must be at most 16777216"),
    (*bad("mooncake", output_length=2**24 + 1), "output_length is 16777217, must be at most 16777216"),
    ("mooncake", json.dumps(MOONCAKE).replace("600", "6" * 5000), "holds a number of more than 4300 digits"),
    (*bad("mooncake", hash_ids=[7]), "1 hash_ids for 600 tokens, must be 2 with blocks of 512 tokens"),
    (*bad("mooncake", hash_ids=[7, 8, 9]), "3 hash_ids for 600 tokens, must be 2"),
    (*bad("mooncake", hash_ids=[7, -8]), "hash_ids holds -8, must hold numbers of at least 0"),
    (*bad("mooncake", hash_ids=[7, "8"]), "hash_ids holds '8', must hold whole numbers"),
    (*bad("mooncake", hash_ids=[7, True]), "hash_ids holds True, must hold whole numbers"),
    (*bad("mooncake", hash_ids=[7, 8.5]), "hash_ids holds 8.5, must hold whole numbers"),
    (*bad("mooncake", hash_ids="78"), "hash_ids is '78', must be a list of whole numbers"),
    ("mooncake", '{"timestamp": 5, "input_length": 600, "out', "not JSON"),
    ("mooncake", '{"timestamp": 5, "input_length": 600, "output_length": 5}', "hash_ids is missing"),
    ("mooncake", "[1, 2]", r"\[1, 2\] stands where an object should"),
    ("mooncake", "[" * 100_000, "not JSON"),
    ("mooncake", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "not JSON"),
    (*bad("bailian"), "chat_id 9 has been used before"),
    (*bad("bailian", chat_id=10, turn=0), "turn is 0, must be at least 1"),
    (*bad("bailian", chat_id=10, parent_chat_id=-2), "parent_chat_id is -2, must be at least -1"),
    (*bad("bailian", chat_id=10, timestamp=4.5), "timestamp 4.5 s is earlier than 5 s before it"),
    (*bad("bailian", chat_id=10, hash_ids=[1, 2, 3]), "3 hash_ids for 20 tokens, must be 2 with blocks of 16 tokens"),
    (*bad("bailian", chat_id=10, parent_chat_id=10), "chat_id and parent_chat_id are both 10"),
    (*bad("bailian", chat_id=10, parent_chat_id=9), "turn is 1, must be above 1 of its parent, chat_id 9"),
    (*bad("bailian", chat_id=10, turn=10**400), r"turn is 1000\d+\.\.\., must be at most 9223372036854775807"),
    (*bad("bailian", chat_id=10, timestamp=1e13), r"timestamp is 10000000000000\.0, must be at most 1e\+12"),
    (*bad("artifact", turn_id=-1), "turn_id is -1, must be at least 0"),
    (*bad("artifact", ts=10**400), r"ts is 1000\d+\.\.\., must be at most 1e\+12"),
    (*bad("artifact", input_tokens=[7, 10**400]), r"input_tokens holds 1000\d+\.\.\., must be at most 4294967295"),
    (*bad("artifact", num_input_tokens=3), "num_input_tokens is 3, but input_tokens holds 2"),
    (*bad("artifact", num_output_tokens=0), "num_output_tokens is 0, but output_tokens holds 1"),
    (*bad("artifact", input_tokens=[7, 2**32]), "input_tokens holds 4294967296, must be at most 4294967295"),
    (*bad("artifact", ts=4.0), "ts 4 is earlier than 5 of its session before it"),
    (*bad("artifact", session_id=None), "session_id is None, must be a whole number or a text"),
    (*bad("agent-text", input=5), "input is 5, must be a text"),
    (*bad("agent-text", timestamp=10**400), r"timestamp is 1000\d+\.\.\., must be at most 1000000000000000000"),
    (*bad("agent-text", timestamp=1.5), "timestamp is 1.5, must be a whole number"),
]


@pytest.mark.parametrize(("form", "line", "says"), CASES)
def test_a_bad_line_is_named_and_can_be_skipped(tmp_path: Path, form: str, line: str, says: str) -> None:
    path = tmp_path / "trace.jsonl"
    good = GOOD[form]
    path.write_text(f"{json.dumps(good)}\n\n{line}\n")
    with pytest.raises(ValueError, match=rf"^[^\n]*trace\.jsonl, line 3: {says}[^\n]*$"):
        read(path)
    reports: list[str] = []
    trace = read(path, on_bad=reports.append)
    assert len(trace.requests) == 1
    assert len(reports) == 1
    assert "trace.jsonl, line 3: " in reports[0]


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
        ("2023-11-16 18:17:05,5", "2 columns, must be 3"),
        ("2023-11-16 18:17:05,-5,4", "ContextTokens is -5, must be at least 1"),
        ("2023-11-16 18:17:05,5,x", "GeneratedTokens is 'x', must be a whole number"),
        ("2023-11-16 18:17:05,5,4.5", "GeneratedTokens is '4.5', must be a whole number"),
        ("2023-11-16 18:17:05,1000000000000000000,4", "ContextTokens is 1000000000000000000, must be at most 16777216"),
        ("2023-11-16 18:17:05,5,100000000000", "GeneratedTokens is 100000000000, must be at most 16777216"),
        (f"2023-11-16 18:17:05,{'9' * 5000},4", "ContextTokens has 5000 digits, must be at most 16777216"),
        (f"2023-11-16 18:17:05,{'9' * 150_000},4", "not CSV"),
        ("yesterday,5,4", "TIMESTAMP is 'yesterday', must be a date and time"),
        ("2023-11-16 18:17:02,5,4", "TIMESTAMP 2023-11-16 18:17:02 is earlier than 2023-11-16 18:17:03 before it"),
        ("2023-11-16 18:17:05+00:00,5,4", "TIMESTAMP has a time zone where others have none"),
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
    with pytest.raises(ValueError, match=r"line 1: the columns are 'TIMESTAMP,ContextTokens', must be TIMESTAMP,"):
        read(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("block_tokens", 0), ("max_sessions", 0), ("session_rate", 0.0), ("session_rate", float("nan")),
     ("session_rate", 1e-320), ("think_time_s", -1.0), ("seed", -1)],
)  # fmt: skip
def test_an_option_that_makes_no_sense_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}, must be"):
        ReadOptions(**{field: value})  # type: ignore[arg-type]


def write_times(path: Path, *times: int) -> Path:
    path.write_text("".join(f"{json.dumps(MOONCAKE | {'timestamp': time})}\n" for time in times))
    return path


@pytest.mark.parametrize(
    ("times", "kept", "reports"),
    [
        ((1, 99, 2, 3), [1, 2, 3], ["line 2: timestamp 99 ms is later than 2 ms after it"]),
        ((99, 1, 1), [1, 1], ["line 1: timestamp 99 ms is later than 1 ms after it"]),
        ((5, 4), [5], ["line 2: timestamp 4 ms is earlier than 5 ms before it"]),
        ((1, 5, 2, 6), [1, 5, 6], ["line 3: timestamp 2 ms is earlier than 5 ms before it"]),
        ((1700000000002, 1700000000001), [1700000000002], ["line 2: timestamp 1700000000001 ms is earlier than"]),
    ],
)
def test_a_time_out_of_order_costs_the_fewest_lines(
    tmp_path: Path, times: tuple[int, ...], kept: list[int], reports: list[str]
) -> None:
    path = write_times(tmp_path / "trace.jsonl", *times)
    found: list[str] = []
    requests = read(path, on_bad=found.append).requests
    assert [round(request.arrival_s * 1000) for request in requests] == kept
    assert len(found) == len(reports)
    assert all(report in message for report, message in zip(reports, found, strict=True))
    with pytest.raises(ValueError, match="is earlier than"):
        read(path)


def test_as_few_are_left_out_as_a_search_of_all_subsets_leaves_out() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        values = rng.integers(0, 6, size=rng.integers(0, 9)).tolist()
        kept = longest_in_order(values)
        assert kept == sorted(set(kept))
        assert [values[index] for index in kept] == sorted(values[index] for index in kept)
        subsets = (
            chosen for size in range(len(values) + 1) for chosen in combinations(range(len(values)), size)
            if all(values[before] <= values[after] for before, after in pairwise(chosen))
        )  # fmt: skip
        assert len(kept) == max(map(len, subsets))


def test_turns_of_an_artifact_session_must_not_go_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    turns = [("a", 0, 1), ("b", 7, 2), ("a", 9, 3), ("a", 1, 4), ("b", 7, 5), ("a", 2, 6)]
    lines = [ARTIFACT | {"session_id": session, "turn_id": turn, "ts": time} for session, turn, time in turns]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ValueError, match=r"line 4: turn_id 1 is earlier than 9 of its session before it$"):
        read(path)
    reports: list[str] = []
    requests = read(path, on_bad=reports.append).requests
    assert [(request.session, request.turn) for request in requests] == [(0, 0), (1, 7), (0, 1), (1, 7), (0, 2)]
    assert [report.partition("jsonl, ")[2] for report in reports] == [
        "line 3: turn_id 9 is later than 1 of its session after it"
    ]


def test_a_row_far_too_late_does_not_take_the_rest_with_it(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:17:{second:02},40,4" for second in range(10)]
    rows.insert(2, "2032-11-16 18:17:00,40,4")
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    reports: list[str] = []
    assert len(read(path, on_bad=reports.append).requests) == 10
    assert [report.partition("csv, ")[2] for report in reports] == [
        "line 4: TIMESTAMP 2032-11-16 18:17:00 is later than 2023-11-16 18:17:02 after it"
    ]


def test_a_child_whose_parent_is_left_out_begins_a_session(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        BAILIAN,
        BAILIAN | {"chat_id": 10, "parent_chat_id": 9, "turn": 2, "timestamp": 99.0},
        BAILIAN | {"chat_id": 11, "parent_chat_id": 10, "turn": 3, "timestamp": 6.0},
        BAILIAN | {"chat_id": 12, "parent_chat_id": 11, "turn": 3, "timestamp": 7.0},
        BAILIAN | {"chat_id": 13, "parent_chat_id": 11, "turn": 4, "timestamp": 8.0},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    reports: list[str] = []
    assert [request.session for request in read(path, on_bad=reports.append).requests] == [0, 1, 1]
    assert [report.partition("jsonl, ")[2][:13] for report in reports] == ["line 2: times", "line 4: turn "]
