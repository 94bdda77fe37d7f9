"""`marconi convert` as a user meets it: a log becomes a trace of token ids that replays as the log does."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marconi.cli import main
from marconi.replay.trace import read
from marconi_cpu.tiny_model import Family, write

NUM_REQUESTS = 400


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model's folder, with a tokenizer, a template and a configuration."""
    folder = tmp_path / "model"
    write(Family.GDN, folder)
    return folder


def log_lines(num_requests: int) -> list[dict[str, Any]]:
    """Chats of a few turns that share one system prompt and run side by side."""
    rng = random.Random(3)  # noqa: S311 - only drawn texts
    lines: list[dict[str, Any]] = []
    while len(lines) < num_requests:
        start_s = 1.7e9 + len(lines) * 0.5
        messages = [{"role": "system", "content": "Answer in one line."}]
        for turn in range(rng.randint(1, 5)):
            messages = [*messages, {"role": "user", "content": f"Question {rng.random()}?"}]
            answer = {"role": "assistant", "content": f"It is {rng.randint(0, 9)}."}
            body = {"messages": messages}
            lines.append({"ts": start_s + turn * 20, "body": body, "response": {"choices": [{"message": answer}]}})
            messages = [*messages, answer]
    return lines[:num_requests]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, log_lines(NUM_REQUESTS))))
    return path


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a conversion that must fail; gives what it says."""

    def run(*argv: str) -> str:
        assert main(["convert", *argv]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    return run


def runs(trace: Path, folder: Path, model: Path | str) -> Any:
    out = folder / "out.json"
    argv = ["replay", str(trace), "--model", str(model), "--memory", "0.2x", "--jobs", "1"]
    assert main([*argv, "--policy", "lru-joint,best", "--json", str(out)]) == 0
    return json.loads(out.read_text())["runs"]


def test_a_converted_log_replays_as_the_log(
    tmp_path: Path, log: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    assert main(["convert", str(log), "--model", str(model), "-o", str(trace)]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.startswith(f"{trace}: 400 requests in ")
    assert said.out.count("\n") == 1
    found = runs(trace, tmp_path, model)
    assert found == runs(log, tmp_path, model / "config.json") == runs(log, tmp_path, model)
    assert found[0]["token_hit_rate"] > 0.3
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    assert found != runs(log, tmp_path, model / "config.json"), "the control: estimates are other tokens"


def test_a_plan_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, log_lines(40))))
    out = ["--table", "--json", str(tmp_path / "plan.json")]
    assert main(["plan", str(path), "--model", "nemotron-h-8b", "--memory", "1GB", "--jobs", "1", *out]) == 0
    said = capsys.readouterr()
    assert "log.jsonl" in said.out
    assert said.err.splitlines() == [
        "marconi: no tokenizer is given: tokens are estimated from bytes, about four a token, and all figures are "
        "approximate"
    ]
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["remarks"] == [said.err.strip().removeprefix("marconi: ")]
    assert plan["verdict"][-1].endswith(f" Note: {plan['remarks'][0]}.")
    assert "tokens are estimated from bytes" in " ".join(said.out.split())


def test_the_line_says_what_an_earlier_request_had(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "log", tmp_path / "trace"
    path.write_text('{"prompt": [1, 2, 3, 4]}\n{"prompt": [1, 2, 3, 9, 9, 9]}\n')
    assert main(["convert", str(path), "-o", str(out)]) == 0
    says = "2 requests in 2 sessions, 10 prompt tokens; an earlier request had 30.00% of them, which no cache exceeds"
    assert capsys.readouterr().out == f"{out}: {says}\n"


def test_without_a_name_the_trace_lies_in_this_folder_by_the_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "monday.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": [1, 2]}\n'))
    monkeypatch.chdir(tmp_path)
    assert main(["convert", "logs/monday.jsonl.gz"]) == 0
    assert len(read("monday.trace.jsonl.gz").requests) == 1


@pytest.mark.parametrize("name", ["-", "generate:wildchat"])
def test_what_has_no_name_must_be_given_one(fails: Callable[..., str], name: str) -> None:
    assert fails(name) == f"marconi: error: -o must name the file to write, {name!r} names none\n"


def test_a_log_is_not_overwritten(tmp_path: Path, fails: Callable[..., str]) -> None:
    path = tmp_path / "log"
    path.write_text('{"prompt": [1]}')
    assert fails(str(path), "-o", str(path)) == (
        f"marconi: error: -o must be another file than the one that is read, got {path}\n"
    )
    assert path.read_text() == '{"prompt": [1]}'


def test_what_cannot_be_written_is_said_before_the_log_is_read(tmp_path: Path, fails: Callable[..., str]) -> None:
    says = fails(str(tmp_path / "absent"), "-o", str(tmp_path / "nowhere" / "trace"))
    assert says == f"marconi: error: -o must be in an existing folder, got {tmp_path}/nowhere/trace\n"


def test_a_trace_of_blocks_has_no_token_ids(tmp_path: Path, fails: Callable[..., str]) -> None:
    path = tmp_path / "blocks"
    path.write_text(json.dumps({"timestamp": 5, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}))
    assert "must be a trace of single tokens for the format artifact, got units of 512 tokens" in fails(
        str(path), "-o", str(tmp_path / "trace")
    )
    assert not (tmp_path / "trace").exists()


def test_bad_lines_are_counted_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "log", tmp_path / "trace"
    path.write_text('{"prompt": [1]}\n{"prompt": [-1]}\n')
    assert main(["convert", str(path), "--skip-bad", "-o", str(out)]) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "marconi: skipped 1 bad record"
    assert len(read(out).requests) == 1


def test_a_result_says_what_was_left_out_and_skipped(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines: list[Any] = [*log_lines(40), {"messages": [], "status": "failure"}, {"prompt": "a", "ts": -1}]
    path.write_text("\n".join(map(json.dumps, lines)))
    for command in ("plan", "replay"):
        argv = [command, str(path), "--model", str(model), "--memory", "1GB", "--jobs", "1", "--skip-bad"]
        assert main([*argv, "--json", str(tmp_path / "out.json")]) == 0
        said = json.loads((tmp_path / "out.json").read_text())["remarks"]
        assert said == [f"left out, a failed call: 1 record ({path}, line 41)", "skipped 1 bad record"]
