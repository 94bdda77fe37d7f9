"""`marconi replay --replicas` as a user meets it."""

import json
from pathlib import Path

import pytest

from marconi.cli import main
from marconi_lab.fleet.variants import VARIANTS

SMALL = ("replay", "generate:agent-append", "--max-sessions", "6", "--model", "nemotron-h-8b", "--memory", "0.2x")


def test_the_same_input_and_seed_give_the_same_bytes_in_any_number_of_processes(tmp_path: Path) -> None:
    texts = []
    for number, jobs in enumerate(("1", "1", "2")):
        path = tmp_path / f"{number}.json"
        argv = (*SMALL, "--replicas", "1,3", "--router", "kv-only,state-aware", "--jobs", jobs, "--json", str(path))
        assert main(argv) == 0
        texts.append(path.read_bytes())
    assert len(set(texts)) == 1
    report = json.loads(texts[0])
    assert [(run["replicas"], run["router"]) for run in report["runs"]] == [
        (1, "kv-only"),
        (1, "state-aware"),
        (3, "kv-only"),
        (3, "state-aware"),
    ]
    (single,) = report["single"]
    for run in report["runs"]:
        assert run["requests_per_s"] is None
        assert run["share_of_single"] == run["token_hit_rate"] / single["token_hit_rate"]
        assert sum(run["reasons"].values()) == run["num_requests"]
        assert 1 <= run["computed_imbalance"] <= run["replicas"]


@pytest.mark.slow
def test_a_thousand_workers_serve_a_small_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main((*SMALL[:-1], "500GB", "--replicas", "1000", "--router", "state-aware", "--jobs", "1")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "state-aware" in line]
    assert [line[0] for line in lines] == ["1,000"]


def test_a_faster_clock_makes_requests_wait(tmp_path: Path) -> None:
    def mean_ttft_s(speedup: str) -> float:
        path = tmp_path / "fleet.json"
        argv = (*SMALL, "--replicas", "2", "--router", "least-loaded", "--speedup", speedup, "--jobs", "1")
        assert main((*argv, "--json", str(path))) == 0
        return float(json.loads(path.read_text())["runs"][0]["ttft_s"]["mean"])

    assert mean_ttft_s("50") > 2 * mean_ttft_s("1")


def test_several_gateways_are_named_and_send_requests_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for number in ("1", "3"):
        path = tmp_path / f"{number}.json"
        argv = (*SMALL, "--replicas", "2", "--router", "state-aware", "--gateways", number, "--jobs", "1")
        assert main((*argv, "--json", str(path))) == 0
        assert ("3 gateways" in capsys.readouterr().out) is (number == "3")
        reports.append(json.loads(path.read_text()))
    assert [report["gateways"] for report in reports] == [1, 3]
    one, three = (report["runs"][0] for report in reports)
    assert one["num_requests"] == three["num_requests"]
    assert one["ttft_s"] != three["ttft_s"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--replicas", "0"), "--replicas must be whole numbers from 1 to 1000, got '0'"),
        (("--replicas", "1001"), "got '1001'"),
        (("--replicas", "eight"), "got 'eight'"),
        (("--replicas", "2,2"), "--replicas must be different numbers, got 2 twice"),
        (("--replicas", "2", "--router", "random"), "--router must be some of round-robin"),
        (
            ("--replicas", "2", "--router", "kv-only,kv-only"),
            "--router must name each rule once, got 'kv-only,kv-only'",
        ),
        (("--router", "kv-only"), "--router must come with --replicas N"),
        (("--gateways", "2"), "--gateways must come with --replicas N"),
        (("--replicas", "2", "--gateways", "0"), "--gateways must be 1 to 100, got 0"),
        (("--speedup", "2"), "--speedup must come with --replicas N"),
        (("--event-delay-ms", "2"), "--event-delay-ms must come with --replicas N"),
        (("--replicas", "2", "--speedup", "0"), "--speedup must be above 0, got 0"),
        (("--replicas", "2", "--event-delay-ms", "-1"), "--event-delay-ms must be 0 or more, got -1"),
        (("--replicas", "2", "--mode", "queueing"), "--mode must be left out with --replicas"),
        (("--replicas", "2", "--policy", "lfu"), "'lfu': a worker must have a cache with a tree"),
        (("--replicas", "2", "--policy", "belady"), "'belady': a bound of hindsight"),
        (("--replicas", "2", "--policy", "static-oracle"), "'static-oracle': a bound of hindsight"),
        (("--replicas", "9", "--memory", "8B"), "--memory must be at least 9 bytes, 1 a worker, got 8"),
    ],
)
def test_bad_input_is_one_line_that_names_it(
    arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = SMALL if "--memory" not in arguments else SMALL[:-2]
    assert main((*shared, *arguments)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert named in told.err


def test_sessions_are_asked_of_a_trace_that_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "blocks.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    argv = ("replay", str(path), "--model", "nemotron-h-8b", "--memory", "1GB", "--replicas", "2")
    assert main((*argv, "--router", "sticky-session-pure")) == 2
    assert "--router sticky-session-pure: the trace must name sessions, got 'blocks.jsonl'" in capsys.readouterr().err
    assert main((*argv, "--router", ",".join(name for name in VARIANTS if "session" not in name))) == 0
