"""The benchmark of the fleet's index at a tiny size: its figures' shape, its checks, and bad input; never its times."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from marconi.router.index import FleetIndex, Hit

from .scripts import load

TINY = ["--blocks", "2000", "--workers", "3", "--prompt-tokens", "8000", "--entries", "700", "--piece", "50"]
TINY += ["--decisions", "20", "--events", "600"]


@pytest.fixture(scope="module")
def fleet_index() -> ModuleType:
    return load("fleet_index")


def test_every_bar_stands_beside_a_figure(
    fleet_index: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "fleet_index.json"
    assert fleet_index.main([*TINY, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    assert written["bars"].keys() <= written.keys()
    assert written["num_blocks"] >= 2000
    assert 0 < written["decision_p50_ms"] <= written["decision_p99_ms"]
    assert 0 < written["dispatch_p50_ms"] <= written["dispatch_p99_ms"]
    assert 0 < written["snapshot_new_longest_ms"] <= written["snapshot_new_worst_ms"]
    assert 0 < written["snapshot_new_ms"] <= written["snapshot_new_worst_ms"]
    assert 0 < written["events_per_s"] <= written["entries_per_s"]
    shown = capsys.readouterr().out
    assert all(bar.name in shown for bar in fleet_index.BARS)


def test_a_wrong_answer_gets_no_figures(
    fleet_index: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FleetIndex, "hits", lambda self, chain: dict.fromkeys(self.workers, Hit(16, 16)))
    path = tmp_path / "fleet_index.json"
    assert fleet_index.main([*TINY, "--json", str(path)]) == 1
    told = capsys.readouterr()
    assert "by definition" in told.err
    assert told.out == ""
    assert not path.exists()


@pytest.mark.parametrize(
    ("arguments", "named"), [(["--workers", "0"], "--workers"), (["--prompt-tokens", "63"], "--prompt-tokens 63")]
)
def test_bad_input_is_one_line_and_status_2(
    fleet_index: ModuleType, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fleet_index.main(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
