"""The benchmark of rules of routing over shapes: what it asks of a rule, its rows, and its errors."""

import json
from pathlib import Path

import pytest

from .scripts import load

shapes = load("fleet_shapes")


def point(**rules: tuple[float, float]) -> "shapes.Point":
    hit_rate = {name: rate for name, (rate, _) in rules.items()}
    place = shapes.Place("chats", "half", 2, 0.1, 3)
    return shapes.Point(place, 100, hit_rate, {name: p95 for name, (_, p95) in rules.items()})


def test_a_rule_holds_if_neither_its_tail_nor_its_hits_are_behind() -> None:
    """The rule of the most hits has too long a tail, so it is not what hits are held against."""
    asked = point(soonest=(0.5, 1.0), near=(0.6, 1.2), behind=(0.58, 1.1), most=(0.9, 1.3))
    assert {name: asked.holds(name) for name in asked.hit_rate} == {
        "soonest": False,
        "near": True,
        "behind": False,
        "most": False,
    }
    assert asked.row.count(" !") == 3
    assert "| near | 1 of 1 | 1.20 | 1.20 | 0.0 | 0.0 |" in shapes.summary([asked])


def test_a_point_is_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "points.json"
    asked = ("--small", "--shape", "random", "--load", "idle", "--memory", "0.5", "--seeds", "1", "--jobs", "1")
    shapes.main([*asked, "--gateways", "2", "--router", "least-loaded,state-aware", "--json", str(written)])
    (found,) = json.loads(written.read_text())["points"]
    assert found["place"]["num_gateways"] == 2
    assert found["num_requests"] > 50
    assert found["hit_rate"].keys() == found["p95_s"].keys() == {"least-loaded", "state-aware"}
    assert capsys.readouterr().out.count("\n") == 8


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [("--shape", "chat", "got 'chat'"), ("--router", "best", "got 'best'"), ("--seeds", "0", "1 or more, got 0")],
)
def test_what_cannot_be_is_one_line(option: str, value: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shapes.main([option, value]) == 2
    assert says in capsys.readouterr().err
