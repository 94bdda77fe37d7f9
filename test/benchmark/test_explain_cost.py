"""The benchmark of explanations at a tiny size: every token has its cause; never its times."""

import json
from pathlib import Path

from .scripts import load


def test_every_request_of_every_row_is_timed_and_every_token_accounted_for(tmp_path: Path) -> None:
    path, script = tmp_path / "explain.json", load("explain_cost")
    assert script.main(["--num-sessions", "2", "--memory", "0.5", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["microseconds"]
    assert [*rows] == [*script.REQUEST_ROWS, "eviction", "answer"]
    assert len({rows[name]["num"] for name in (*script.REQUEST_ROWS, "answer")}) == 1
    for row in rows.values():
        assert row["num"] > 5
        assert 0 < row["p50"] <= row["p99"]


def test_a_whole_request_is_timed_with_explanations_with_steps_or_none_and_twice_without_either(tmp_path: Path) -> None:
    path, script = tmp_path / "whole.json", load("explain_cost")
    assert script.main(["--whole", "--num-sessions", "2", "--memory", "0.5", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["microseconds"]
    assert [*rows] == ["on", "on, no steps", "off", "off again"]
    assert len({row["num"] for row in rows.values()}) == 1
