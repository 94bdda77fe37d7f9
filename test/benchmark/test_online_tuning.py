"""The online tuning benchmark's own part: what it measures, and bad input is one line. Times are not asserted."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from .scripts import load


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load("online_tuning")


def test_every_length_is_measured_and_nothing_is_dropped(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuning.json"
    assert benchmark.main(["--num-requests", "3", "--model", "nemotron-h-8b", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert (document["benchmark"], document["bar_us"]) == ("online_tuning", benchmark.BAR_US)
    rows = document["rows"]
    assert [row["num_tokens"] for row in rows] == list(benchmark.LENGTHS)
    assert all((row["num_requests"], row["records_dropped"]) == (3, 0) for row in rows)
    assert all(0 < row["median_us"] <= row["p99_us"] for row in rows)
    assert all(row["mean_us"] <= row["p99_us"] for row in rows), "of three requests the slowest"
    printed = capsys.readouterr().out
    assert all(f"{row['num_tokens']:,}" in printed for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-requests", "0"], "--num-requests must be 1 or more, got 0"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--json", "/nowhere/tuning.json"], "/nowhere/tuning.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    benchmark: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(["--num-requests", "1", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
