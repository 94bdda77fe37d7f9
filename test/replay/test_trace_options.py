"""Options of the command line that a trace has no use for, and what is said of a trace that cannot be read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from marconi.cli import main
from marconi.replay.trace import ReadOptions, UnusedOption, read, readers
from marconi.replay.trace.base import check_used

WORLD = ("--model", "nemotron-h-8b", "--memory", "1GB", "--policy", "lru-joint")
LINES = {
    "mooncake": {"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
    "bailian": {
        "chat_id": 9, "parent_chat_id": -1, "timestamp": 5.0, "input_length": 20, "output_length": 5, "type": "text",
        "turn": 1, "hash_ids": [7, 8],
    },
    "artifact": {
        "session_id": 4, "turn_id": 0, "ts": 5.0, "num_input_tokens": 1, "num_output_tokens": 1, "input_tokens": [7],
        "output_tokens": [9],
    },
    "agent-text": {"timestamp": 5, "input": "Hi", "output": "Hello", "session_id": "s"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
}  # fmt: skip


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs a replay that must fail; gives what it says on stderr."""

    def fails(trace: Path | str, *options: str) -> list[str]:
        assert main(["replay", str(trace), *WORLD, *options]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        return said.err.splitlines()

    return fails


@pytest.mark.parametrize(
    ("form", "option", "why"),
    [
        ("mooncake", ("--session-rate", "2"), "--session-rate: a mooncake trace has its own times"),
        ("mooncake", ("--max-sessions", "2"), "--max-sessions: a mooncake trace names no sessions"),
        ("mooncake", ("--tokenizer", "t.json"), "--tokenizer: a mooncake trace holds no text"),
        ("bailian", ("--session-rate", "2"), "--session-rate: a bailian trace has its own times"),
        ("artifact", ("--session-rate", "2"), "--session-rate: an artifact trace has its own times"),
        ("artifact", ("--tokenizer", "t.json"), "--tokenizer: an artifact trace holds no text"),
    ],
)
def test_an_option_that_does_nothing_is_refused_by_its_flag(
    tmp_path: Path, fails: Callable[..., list[str]], form: str, option: tuple[str, str], why: str
) -> None:
    path = tmp_path / "trace"
    path.write_text(json.dumps(LINES[form]))
    assert fails(path, *option) == [f"marconi: error: {why}"]
    assert fails(path, *option, "--format", form) == [f"marconi: error: {why}"]


def test_an_option_that_does_something_is_taken(tmp_path: Path) -> None:
    for form, line in LINES.items():
        path = tmp_path / form
        path.write_text(json.dumps(line))
        rate = 2.0 if form in ("agent-text", "sharegpt") else None
        num_sessions = None if form == "mooncake" else 1
        assert (
            len(read(path, ReadOptions(session_rate=rate, max_sessions=num_sessions, block_tokens=None)).requests) == 1
        )


@pytest.mark.parametrize("form", readers())
def test_every_reader_takes_the_options_as_they_are_and_those_that_it_names(form: str, tmp_path: Path) -> None:
    reader = readers()[form]
    check_used(reader, ReadOptions(seed=5, block_tokens=3))
    changed = {
        "session_rate": ReadOptions(session_rate=2.0),
        "think_time_s": ReadOptions(think_time_s=1.0),
        "max_sessions": ReadOptions(max_sessions=1),
        "system_prompts": ReadOptions(system_prompts="own"),
        "models": ReadOptions(models="separate"),
        "tokenizer": ReadOptions(tokenizer=tmp_path),
        "time_unit": ReadOptions(time_unit="ms"),
    }
    assert reader.uses <= changed.keys()
    for option, options in changed.items():
        if option in reader.uses:
            check_used(reader, options)
        else:
            with pytest.raises(UnusedOption, match=rf"^{option}: an? {form} trace "):
                check_used(reader, options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--session-rate", "0"), "session_rate must be a number of sessions a second, 1e-09 or more, got 0.0"),
        (("--tokenizer", "t.json"), "--tokenizer must be left out for a drawn trace, got t.json"),
        (("--format", "mooncake"), "--format must be left out for a drawn trace, got mooncake"),
    ],
)
def test_a_drawn_trace_takes_no_option_that_does_nothing_and_no_rate_of_0(
    fails: Callable[..., list[str]], options: tuple[str, ...], says: str
) -> None:
    assert fails("generate:chat-short", *options) == [f"marconi: error: {says}"]


def test_a_trace_without_a_name_is_not_the_folder_that_one_stands_in(fails: Callable[..., list[str]]) -> None:
    assert fails("") == ["marconi: error: TRACE must be a file, a folder or generate:WORKLOAD, got ''"]
    with pytest.raises(ValueError, match="the trace must be a file or a folder, got no name"):
        read("")


def test_what_was_skipped_is_said_where_nothing_is_left(tmp_path: Path, fails: Callable[..., list[str]]) -> None:
    path = tmp_path / "trace"
    path.write_text(f"{json.dumps(LINES['mooncake'] | {'input_length': -1})}\n" * 5)
    said = fails(path, "--skip-bad")
    reasons = [f"marconi: skipped: {path}, line {n}: input_length must be int >= 1, got -1" for n in (1, 2, 3)]
    last = f"marconi: error: {path}: holds no request that was asked for"
    assert said == [*reasons, "marconi: skipped 5 bad records", last]
