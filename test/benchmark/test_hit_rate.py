"""The hit-rate benchmark: what it asks of a point, its page, and its errors."""

import json
from pathlib import Path

import pytest

from .scripts import load

hit_rate = load("hit_rate")


def point(**rates: float) -> "hit_rate.Point":
    hit_rates = dict.fromkeys(hit_rate.POLICIES, 0.5) | {"belady": 0.8, "best": 0.6} | rates
    return hit_rate.Point("reporting", "coding-agent 0.02/s", "nemotron-h-8b", 0.05, 10**9, hit_rates, {})


def test_the_gap_is_the_way_from_joint_lru_to_hindsight() -> None:
    assert point().gap_closed == pytest.approx(1 / 3)
    assert point(belady=0.5019).gap_closed is None, "a tie is no gap"


def test_no_point_makes_up_for_others_in_the_mean() -> None:
    points = [point(belady=0.51), point(best=0.5), point(belady=0.5)]
    assert points[0].gap_closed == pytest.approx(10)
    assert hit_rate.mean_gap_closed(points) == 0.5
    assert hit_rate.pooled_gap_closed(points) == pytest.approx(0.2 / 0.31)


@pytest.mark.parametrize("peer", hit_rate.PEERS)
def test_losing_to_a_peer_by_more_than_a_tie_is_a_failure(peer: str) -> None:
    assert point(**{peer: 0.6019}).failures == (("marconi < lru-joint",) if peer == "lru-joint" else ())
    assert f"best < {peer}" in point(**{peer: 0.6021}).failures


def test_marconi_is_held_against_joint_lru() -> None:
    assert point(marconi=0.4981).failures == ()
    assert point(marconi=0.4979).failures == ("marconi < lru-joint",)


def test_the_page_shows_the_report_first_and_says_where_it_fails() -> None:
    tuning = hit_rate.Point("tuning", "w", "m", 0.1, 1, point().hit_rate, {})
    lines = hit_rate.page([{"points": [tuning.to_json()]}, {"points": [point(marconi=0.1).to_json()]}]).splitlines()
    assert lines.index("## The reporting half") < lines.index("## The tuning half")
    text = "\n".join(lines)
    assert "The bars are missed at: coding-agent 0.02/s, nemotron-h-8b, 0.05: marconi < lru-joint." in text
    assert "Every bar is met." in text
    assert "**33 %**" in text


def test_the_page_is_written_from_result_files(tmp_path: Path) -> None:
    written, out = tmp_path / "r.json", tmp_path / "page.md"
    written.write_text(json.dumps({"points": [point().to_json()]}))
    assert hit_rate.main(["--page", str(out), str(written)]) == 0
    assert "| coding-agent 0.02/s | nemotron-h-8b | 0.05 |" in out.read_text()


def test_a_folder_without_the_traces_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hit_rate.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_on_generated_workloads_marconi_caches_more_than_joint_lru(capsys: pytest.CaptureFixture[str]) -> None:
    """Few sessions of each: at single points a state more or less decides, so that the claim is of the mean."""
    points = hit_rate.measure_generated(1, num_sessions=12)
    assert len(points) == len(hit_rate.SEEDS) * len(hit_rate.GENERATED) * len(hit_rate.MODELS) * 5
    gains = [each.hit_rate["marconi"] - each.hit_rate["lru-joint"] for each in points]
    assert sum(gains) / len(gains) > 0.01
    hit_rate.Console(width=200).print(hit_rate.render(points))
    assert "tool-chat" in capsys.readouterr().out
    worse = hit_rate.replace(points[0], hit_rate=points[0].hit_rate | {"marconi": 0.0, "lru-joint": 0.5})
    assert "marconi < lru-joint" in worse.failures
