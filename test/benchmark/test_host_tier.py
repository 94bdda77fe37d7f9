"""The host-tier benchmark: what it asks of its points, and a run on made-up sessions."""

import json
import sys
from pathlib import Path

import pytest

from marconi.replay.trace import Half

from .scripts import FOLDER, load

sys.path.insert(0, str(FOLDER))
host_tier = load("host_tier")
sys.path.remove(str(FOLDER))


def point(best_s: float = 60.0, hit_rate: float = 0.98) -> "host_tier.Point":
    seconds = {"lru": 100.0, "lru-write-back": 120.0, "lru-joint": 90.0, "best": best_s}
    rates = dict.fromkeys(host_tier.POLICIES, hit_rate)
    return host_tier.Point("reporting", "w", "m", 0.1, 10**9, seconds, rates, dict.fromkeys(rates, 1.0), 50.0, 1.0)


def test_a_point_is_held_against_stocks_better_policy() -> None:
    assert point().ratio == pytest.approx(0.6)
    assert host_tier.missed([point()]) == []


def test_the_mean_is_geometric_and_no_point_may_be_worse() -> None:
    points = [point(40.0), point(101.0)]
    assert host_tier.mean_ratio(points) == pytest.approx((0.4 * 1.01) ** 0.5)
    assert host_tier.missed(points) == ["reporting w m 0.1x: best over stock 1.010, at most 1 is asked"]
    assert "0.80 in the mean" in host_tier.missed([point(80.0)])[0]


def test_too_few_of_the_hits_without_end_are_said() -> None:
    assert host_tier.missed([point(hit_rate=0.96)]) == [
        "reporting w m 0.1x: 96.0 % of the hits without end, at least 97 are asked"
    ]


def test_every_policy_is_replayed_at_every_memory(tmp_path: Path) -> None:
    blocks = [[session, *range(100 * session + 50, 100 * session + 54)] for session in range(6)]
    lines = [
        {"timestamp": 1000 * index, "input_length": 512 * 5, "output_length": 8, "hash_ids": blocks[index % 6]}
        for index in range(48)
    ]
    file = tmp_path / "made-up.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = host_tier.measure(tmp_path, Half.ALL, host_tier.Workload(file.name), None, 1)
    assert len(found) == len(host_tier.MODELS) * len(host_tier.FRACTIONS)
    for each in found:
        assert set(each.seconds) == set(host_tier.POLICIES)
        assert each.unbounded_hit_rate >= max(each.hit_rate.values())
        assert all(seconds > 0 for seconds in each.seconds.values())
    assert host_tier.render(found).row_count == len(found)


def test_a_folder_without_the_traces_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert host_tier.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
