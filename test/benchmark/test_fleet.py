"""The fleet benchmark: what it asks of a point, its rows, and its errors."""

from pathlib import Path

import pytest

from .scripts import load

fleet = load("fleet")


def point(num_replicas: int = 8, single: float = 0.6, **rates: float) -> "fleet.Point":
    hit_rates = {"sticky-hash": 0.4, "kv-only": 0.5, "state-aware": 0.6} | rates
    runs = {name: {"token_hit_rate": rate, "ttft_s": {"p95": 1.0}} for name, rate in hit_rates.items()}
    return fleet.Point("tuning", "w", "m", "best", 0.1, num_replicas, single, runs)


def test_what_is_asked_is_held_against_both_baselines_and_one_cache() -> None:
    assert point().failures == ()
    assert point(**{"kv-only": 0.51}).failures == ("1.18x kv-only",)
    assert point(**{"sticky-hash": 0.6}).failures == ("1.00x sticky-hash",)
    assert point(single=0.64).failures == ("0.94 of one cache",)
    assert point(single=0.64, num_replicas=64).failures == ()


def test_a_row_has_a_cell_for_every_rule_also_where_the_trace_has_no_sessions() -> None:
    row = point().row
    assert row.count("|") == len(fleet.HEAD) + 1
    assert "| 60.0 (1 s) |" in row
    assert "| - |" in row


def test_a_folder_without_the_traces_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
