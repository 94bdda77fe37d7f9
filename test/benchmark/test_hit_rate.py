"""The hit-rate benchmark: what it asks of a point, its page, and its errors."""

import json
from pathlib import Path

import pytest

from .scripts import load

hit_rate = load("hit_rate")


def point(**rates: float) -> "hit_rate.Point":
    hit_rates = dict.fromkeys(hit_rate.POLICIES, 0.5) | {"bound": 0.8, "best": 0.6} | rates
    return hit_rate.Point("reporting", "coding-agent 0.02/s", "nemotron-h-8b", 0.05, 10**9, hit_rates)


def test_the_gap_lies_between_joint_lru_and_the_bound() -> None:
    assert point().gap_closed == pytest.approx(1 / 3)
    assert point(bound=0.5019, best=0.5).gap_closed is None, "a tie is no gap"


def test_points_without_a_gap_do_not_count() -> None:
    points = [point(), point(best=0.5), point(bound=0.5, best=0.5)]
    assert hit_rate.mean_gap_closed(points) == pytest.approx(1 / 6)
    assert hit_rate.pooled_gap_closed(points) == pytest.approx(0.1 / 0.6)


@pytest.mark.parametrize("policy", hit_rate.POLICIES)
def test_a_hit_rate_above_the_bound_is_a_failure(policy: str) -> None:
    assert point(**{policy: 0.8}).failures != (f"{policy} > bound",)
    assert f"{policy} > bound" in point(**{policy: 0.8001}).failures


@pytest.mark.parametrize("peer", hit_rate.PEERS)
def test_losing_to_a_peer_by_more_than_a_tie_is_a_failure(peer: str) -> None:
    assert point(**{peer: 0.6019}).failures == (("marconi < lru-joint",) if peer == "lru-joint" else ())
    assert f"best < {peer}" in point(**{peer: 0.6021}).failures


def test_marconi_is_held_against_joint_lru() -> None:
    assert point(marconi=0.4981).failures == ()
    assert point(marconi=0.4979).failures == ("marconi < lru-joint",)


PAGE = """# Hit rates

Words.

## The reporting half

Old.

## In a server

Kept.

## The tuning half

Old."""


def test_the_tables_of_a_page_are_made_anew_and_all_else_stays() -> None:
    tuning = hit_rate.Point("tuning", "w", "m", 0.1, 1, point().hit_rate)
    documents = [{"points": [tuning.to_json()]}, {"points": [point(marconi=0.1).to_json()]}]
    text = hit_rate.page(PAGE, documents)
    before, reporting, kept, made = (f"{part}\n" for part in text.split("\n## "))
    assert (before, kept) == ("# Hit rates\n\nWords.\n\n", "In a server\n\nKept.\n\n")
    assert "The bars are missed at: coding-agent 0.02/s, nemotron-h-8b, 0.05: marconi < lru-joint." in reporting
    assert "| coding-agent 0.02/s | nemotron-h-8b | 0.05 | 50.00 |" in reporting
    assert "Every bar is met." in made
    assert "**33 %**" in made
    assert hit_rate.page(text, documents) == text
    assert hit_rate.page(PAGE, documents[:1]).partition("## The tuning")[0] == PAGE.partition("## The tuning")[0]


def test_the_tables_are_written_from_result_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, out = tmp_path / "r.json", tmp_path / "page.md"
    written.write_text(json.dumps({"points": [point().to_json()]}))
    out.write_text(PAGE)
    assert hit_rate.main(["--page", str(out), str(written)]) == 0
    assert "| coding-agent 0.02/s | nemotron-h-8b | 0.05 |" in out.read_text()
    out.write_text("# Another page")
    assert hit_rate.main(["--page", str(out), str(written)]) == 2
    assert "must have a line '## The reporting half'" in capsys.readouterr().err


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
