"""`marconi demo` as a user runs it: a comparison as JSON, refusals of one line, nothing left behind by Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from marconi.engine.demo.comparison import compare, table_of
from marconi.engine.demo.endpoint import Answer
from marconi.engine.demo.program import NUM_REQUESTS
from marconi.engine.server_process import environment

MARCONI = (sys.executable, "-m", "marconi")


def marconi(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MARCONI, *args], env=environment(), capture_output=True, text=True, timeout=500, check=False
    )


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The single line of an error with exit status 2."""
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.strip().splitlines()
    return line


def test_the_demo_compares_both_servers_and_finds_every_answer_equal(tmp_path: Path) -> None:
    out = tmp_path / "demo.json"
    done = marconi("demo", "--family", "mamba2", "--context-chars", "1500", "--max-new-tokens", "8", "--json", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(out.read_text())
    assert set(document) == {"model", "device", "requests", "versions"}
    assert document["model"] == "tiny-mamba2"
    assert document["versions"]["sglang"] == "0.5.23"
    requests = document["requests"]
    assert len(requests) == NUM_REQUESTS
    for request in requests:
        assert set(request) == {"name", "prompt_tokens", "cached_tokens", "ttft_s", "equal"}
        assert request["equal"] is True
        assert request["cached_tokens"]["marconi"] >= request["cached_tokens"]["stock"]
        assert all(0 < seconds < 60 for seconds in request["ttft_s"].values())
    branches = [request for request in requests if request["name"].startswith("branch")]
    assert all(request["cached_tokens"]["marconi"] > 0 for request in branches)


def test_ctrl_c_stops_every_process_that_the_demo_started() -> None:
    demo = subprocess.Popen(
        [*MARCONI, "demo"], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started: list[psutil.Process] = []
    deadline_s = time.monotonic() + 120
    while len(started) < 3 and time.monotonic() < deadline_s:
        started = psutil.Process(demo.pid).children(recursive=True)
        time.sleep(0.1)
    assert started, "the demo never started a server"
    os.kill(demo.pid, signal.SIGINT)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert errors.strip().splitlines()[-1] == "marconi: interrupted"
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(started, timeout=10)
    assert alive == []


def test_bad_input_is_one_line(tmp_path: Path, attention_model: Path) -> None:
    assert "invalid choice: 'lstm'" in one_line(marconi("demo", "--family", "lstm"))
    assert "'0' is not a whole number, 1 or more" in one_line(marconi("demo", "--context-chars", "0"))
    gone = str(tmp_path / "gone")
    assert f"{gone!r} does not exist" in one_line(marconi("demo", "--model-path", gone))
    nowhere = str(tmp_path / "no" / "such.json")
    assert "does not exist" in one_line(marconi("demo", "--json", nowhere))
    assert "has no recurrent layers" in one_line(marconi("demo", "--model-path", str(attention_model)))
    assert "invalid choice: 'rnn'" in one_line(marconi("tiny-model", "--family", "rnn", "--out", gone))


def answers(*token_lists: tuple[str, ...]) -> list[Answer]:
    return [Answer(f"request {i}", 10, 5, 0.1, tokens) for i, tokens in enumerate(token_lists)]


def test_an_answer_that_differs_is_said_to_differ() -> None:
    requests = compare({"stock": answers(("1", "2"), ("3",)), "marconi": answers(("1", "2"), ("4",))})
    assert [request.equal for request in requests] == [True, False]
    assert table_of(requests, "title").columns[-1].footer == "DIFFERS"


def test_runs_of_different_work_are_not_compared() -> None:
    with pytest.raises(ValueError, match="did different work"):
        compare({"stock": answers(("1",)), "marconi": answers(("1",), ("2",))})
