"""The benchmark of divisions compares the same requests in the same bytes; which division is ahead is not asserted."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from .scripts import FOLDER, load

OPTIONS = ["--num-requests", "60", "--memory", "0.2", "--model", "nemotron-h-8b", "--processes", "1"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With threads for workers: a fork would copy whatever other tests have started here."""
    monkeypatch.syspath_prepend(FOLDER)
    module = load("split")
    monkeypatch.setattr(module, "ProcessPoolExecutor", ThreadPoolExecutor)
    return module


def test_every_division_serves_the_same_requests_and_the_best_of_a_row_has_no_regret(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "split.json"
    assert benchmark.main(["generate:agent-append", *OPTIONS, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    (row,) = document["rows"]
    assert document["ratios"] == list(benchmark.RATIOS)
    assert len(row["over_stock"]) == len(row["regrets"]) == len(benchmark.RATIOS)
    assert min(row["regrets"]) == 0
    assert row["over_stock"].index(min(row["over_stock"])) == row["regrets"].index(0)
    assert len(set(row["over_stock"])) > 1, "the division changes what is recomputed"
    assert document["summary"]["mean_regret"] == row["regrets"]
    *ratios, _ = row["over_stock"]
    assert document["summary"]["mean_regret_of_ratios"] == [each - min(ratios) for each in ratios]
    assert "one pool" in capsys.readouterr().out


def test_a_workload_that_does_not_exist_is_one_line(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["generate:nothing", *OPTIONS]) == 2
    assert "nothing" in capsys.readouterr().err.splitlines()[-1]
