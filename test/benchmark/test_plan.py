"""The plan benchmark's own part: it plans a log of the size asked for as the command does. Seconds are not asserted."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from marconi.cli import main as marconi
from marconi_cpu import tiny_model

from .scripts import load


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load("plan")


@pytest.mark.slow
def test_the_stages_of_a_plan_are_timed(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "seconds.json"
    assert benchmark.main(["--chats", "12", "--jobs", "1", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["num_requests"] == 12
    assert [stage["name"] for stage in document["stages"]] == ["read", "replay", "print"]
    assert all(stage["wall_s"] > 0 and stage["cpu_s"] >= 0 for stage in document["stages"])
    printed = capsys.readouterr().out

    log, model = tmp_path / "log.jsonl", tmp_path / "model"
    lines = list(benchmark.log_of(12, seed=0))
    assert len(lines) == 12
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    tiny_model.write(tiny_model.Family.GDN, model, seed=0)
    assert marconi(["plan", str(log), "--model", str(model), "--memory", "0.1x", "--jobs", "1"]) == 0
    commanded = capsys.readouterr().out
    assert "How sure is it? The trace has 12 requests" in commanded
    assert printed.startswith(commanded)


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--chats", "1", "--memory", "0GB"], "memory must be more than 0 bytes"), (["--memory", "8"], "with a unit")],
)
def test_bad_input_is_one_line_and_status_2(
    argv: list[str], message: str, benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
