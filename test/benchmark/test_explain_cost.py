"""The benchmark of explanations at a tiny size: every token has its cause; never its times."""

import json
from pathlib import Path

from .scripts import load


def test_every_request_is_timed_and_every_token_accounted_for(tmp_path: Path) -> None:
    path = tmp_path / "explain.json"
    assert load("explain_cost").main(["--num-sessions", "2", "--memory", "1", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["num_requests"] > 5
    assert 0 < result["microseconds"]["p50"] <= result["microseconds"]["p99"]
