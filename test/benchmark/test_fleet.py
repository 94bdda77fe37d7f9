"""The fleet benchmark: what it asks of a point, its rows, and its errors."""

import sys
from pathlib import Path

import pytest

from .scripts import FOLDER, load

sys.path.insert(0, str(FOLDER))
fleet = load("fleet")
sys.path.remove(str(FOLDER))


def point(p95_s: float = 1.0, **rates: float) -> "fleet.Point":
    hit_rates = {"sticky-hash": 0.6, "kv-only": 0.5, "state-aware": 0.6} | rates
    runs = {
        name: {"token_hit_rate": rate, "ttft_s": {"p95": p95_s if name == "state-aware" else 1.0}}
        for name, rate in hit_rates.items()
    }
    return fleet.Point("tuning", "w", "m", "best", 0.1, 8, 0.6, runs)


def test_what_is_asked_is_held_against_the_best_rule() -> None:
    assert point().failures == ()
    assert point(p95_s=1.2).failures == ()
    assert point(p95_s=1.3).failures == ("P95 1.30x the least",)
    assert point(**{"kv-only": 0.609}).failures == ()
    assert point(**{"kv-only": 0.62}).failures == ("2.0 points of hits",)


def test_a_row_has_a_cell_for_every_rule_also_where_the_trace_has_no_sessions() -> None:
    row = point().row
    assert row.count("|") == len(fleet.HEAD) + 1
    assert "| 60.0 (1 s) |" in row
    assert "| - |" in row


def test_a_folder_without_the_traces_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
