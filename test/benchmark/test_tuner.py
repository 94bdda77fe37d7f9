"""The tuner benchmark's own part: it measures what it says, and bad input is one line. Times are not asserted."""

import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from marconi.tuning import Decision

from .scripts import load


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load("tuner")


def test_a_run_writes_its_figures(benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    benchmark.main(["--num-requests", "60", "--num-workers", "1", "--num-runs", "1", "--json", str(out)])
    record = json.loads(out.read_text())
    (run,) = record["runs"]
    assert record["num_values"] == 21
    assert record["num_requests"] == 60
    assert run["num_nodes"] > 60
    assert all(value > 0 for value in run.values())
    assert "60 requests x 21 values" in " ".join(capsys.readouterr().out.split())


def test_made_up_conversations_are_the_same_each_time_and_grow(benchmark: ModuleType) -> None:
    trace = benchmark.made_up(700)
    assert trace == benchmark.made_up(700)
    by_session: dict[int, list[bytes]] = {}
    for request in trace.requests:
        assert request.num_known_tokens == request.num_prompt_tokens + request.num_output_tokens
        by_session.setdefault(request.session, []).append(request.path)
    turns = [paths for paths in by_session.values() if len(paths) > 1]
    assert turns
    assert all(later.startswith(earlier) for paths in turns for earlier, later in pairwise(paths))


def test_scores_that_differ_give_no_figures(benchmark: ModuleType) -> None:
    decision = Decision(10, 0.0, 0.0, {0.0: 0.5, 1.0: 0.25})
    benchmark.check(decision, {0.0: 0.5, 1.0: 0.25})
    with pytest.raises(SystemExit, match="differ"):
        benchmark.check(decision, {0.0: 0.5, 1.0: 0.26})
    with pytest.raises(SystemExit, match="failed: no luck"):
        benchmark.check(Decision(10, 0.0, 0.0, {}, failure="no luck"), {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-requests", "0"], "--num-requests must be 1 or more, got 0"),
        (["--memory", "0"], "--memory must be a share above 0 and up to 1, got 0.0"),
        (["--model", "no-such-model"], "no-such-model"),
        (["no-such-file.jsonl"], "no-such-file.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        benchmark.main(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
