"""`marconi plan` for several ranks: one server of all, or a server of each behind a router, on the same cards."""

import json
from pathlib import Path
from typing import Any

import pytest

from marconi.cli import main
from marconi.model import load

MODEL = "nemotron-h-8b"
RANKS = 2


def planned(path: Path, *argv: str) -> dict[str, Any]:
    words = ["plan", "generate:agent-append", "--max-sessions", "6", "--model", MODEL, "--jobs", "1"]
    assert main([*words, "--json", str(path), *argv]) == 0
    (advice,) = json.loads(path.read_text(encoding="utf-8"))["advice"]
    assert isinstance(advice, dict)
    return advice


def test_both_layouts_have_the_memory_of_the_same_cards(tmp_path: Path) -> None:
    advice = planned(tmp_path / "plan.json", "--memory", "20GB", "--tensor-parallel", str(RANKS))
    together, apart = advice["layouts"]
    weight_bytes = 2 * load(MODEL).num_parameters
    assert (together["num_servers"], together["memory_bytes"]) == (1, 20 * 10**9)
    assert apart["num_servers"] == RANKS
    assert apart["memory_bytes"] + weight_bytes == together["memory_bytes"] + weight_bytes // RANKS
    assert 0 < apart["token_hit_rate"] <= 1
    assert "2 servers of one rank behind a router" in advice["sentences"][-1]


def test_the_servers_of_one_rank_are_a_fleet_of_that_model_on_one_card(tmp_path: Path) -> None:
    advice = planned(tmp_path / "plan.json", "--memory", "20GB", "--tensor-parallel", str(RANKS))
    apart = advice["layouts"][1]
    path = tmp_path / "fleet.json"
    words = ["replay", "generate:agent-append", "--max-sessions", "6", "--model", MODEL, "--jobs", "1"]
    words += ["--memory", f"{RANKS * apart['memory_bytes']}B", "--policy", advice["policy"], "--router", "state-aware"]
    words += ["--mamba-full-memory-ratio", "0.9"] if advice["policy"] == "lru" else []
    assert main([*words, "--replicas", str(RANKS), "--json", str(path)]) == 0
    (run,) = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert run["token_hit_rate"] == apart["token_hit_rate"]
    assert run["ttft_s"]["p95"] == apart["ttft_s"]["p95"]


@pytest.mark.parametrize(
    ("argv", "num_layouts"),
    [
        (("--memory", "20GB"), 0),
        # A card of 12 GB has no room for 16 GB of weights.
        (("--memory", "4GB", "--tensor-parallel", "2"), 1),
    ],
)
def test_what_cannot_be_compared_is_not(argv: tuple[str, ...], num_layouts: int, tmp_path: Path) -> None:
    advice = planned(tmp_path / "plan.json", *argv)
    assert len(advice["layouts"]) == num_layouts
    assert ("one server is the only layout" in advice["sentences"][-1]) == (num_layouts == 1)
