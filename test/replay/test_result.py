"""What a run gives, by definition, and the layout of the result file."""

import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from marconi.model import DEVICES, load
from marconi.policy.catalog import PolicySpec
from marconi.policy.request import Request, Trace, pack
from marconi.replay import serial
from marconi.replay.result import Percentiles, PolicyResult, Report, dumps, require_writable, summarise, write
from marconi.replay.task import ReplayInputs, Task
from marconi_lab.block.server import BlockServer

from . import worlds
from .worlds import SecondAToken, request, trace

WORKED = trace(
    request("abcd", "efg", 0.0),
    request("abcdefgh!", "", 1.0),
    request("abxyz", "", 2.0),
    request("abq", "", 3.0),
)
HITS = (0, 6, 0, 2)
PROMPTS = (4, 9, 5, 3)
NUM_NEW, NUM_BOUND = 10, 12


INPUTS = ReplayInputs(WORKED, load("marconi-7b"), DEVICES["h100"], SecondAToken(), slo_s=3.5, seed=3)


@pytest.fixture
def run() -> PolicyResult:
    target = worlds.server(60)
    outcome = serial.replay(WORKED, target, SecondAToken())
    found = summarise(INPUTS, Task(PolicySpec("lru-joint"), 60), target, outcome)
    return replace(found, num_new_tokens=NUM_NEW, most_hit_tokens=NUM_BOUND)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (range(1, 101), (50, 95, 99)),
        (range(100, 0, -1), (50, 95, 99)),
        ([7], (7, 7, 7)),
        ([1, 2], (1, 2, 2)),
        ([3, 1, 2], (2, 3, 3)),
        (range(1, 202), (101, 191, 199)),
    ],
)
def test_a_percentile_is_the_nearest_rank(values: "range | list[int]", expected: tuple[int, int, int]) -> None:
    found = Percentiles.of([float(value) for value in values])
    assert (found.p50, found.p95, found.p99) == expected
    for percent, value in zip((50, 95, 99), expected, strict=True):
        ordered = sorted(values)
        assert value == ordered[math.ceil(percent * len(ordered) / 100) - 1]


def test_a_run_sums_up_what_was_served(run: PolicyResult) -> None:
    model = load("marconi-7b")
    assert run.num_hit_tokens == sum(HITS)
    assert run.num_prompt_tokens == sum(PROMPTS)
    assert run.token_hit_rate == sum(HITS) / sum(PROMPTS)
    assert run.flops_saved == sum(map(model.prefix_flops, HITS))
    assert run.flops_saved_share == pytest.approx(run.flops_saved / sum(map(model.prefix_flops, PROMPTS)))
    assert run.ttft_s == Percentiles(3.0, 5.0, 5.0)
    assert run.num_slo_violations == 2
    assert run.num_states_hit == 2
    held = run.num_states_kept * INPUTS.costs.state_bytes
    assert 0 < held < run.held_bytes <= held + 60 * INPUTS.costs.kv_bytes_per_token


def test_states_written_are_kept_or_evicted(run: PolicyResult) -> None:
    num_evicted = sum(count for _, count in run.num_evictions)
    assert num_evicted > 0
    assert run.num_states_written == run.num_states_kept + num_evicted


def test_the_result_file_has_the_layout_that_is_documented(run: PolicyResult) -> None:
    document = Report(INPUTS, None, (run,)).to_json()
    assert {"trace": "made-up", "model": "marconi-7b", "seed": 3}.items() <= document.items()
    (one,) = json.loads(dumps(document))["runs"]
    assert one["policy"] == "lru-joint"
    assert one["memory_bytes"] == 60
    assert one["recomputed_tokens"] == sum(PROMPTS) - sum(HITS)
    assert one["bound_token_hit_rate"] == NUM_BOUND / sum(PROMPTS)
    assert one["prefill_amplification"] == (sum(PROMPTS) - sum(HITS)) / NUM_NEW
    assert one["ttft_s"] == {"p50": 3.0, "p95": 5.0, "p99": 5.0}
    assert one["evictions"] == sum(one["evictions_by_reason"].values())
    assert set(one["evictions_by_reason"]) == {"bytes", "kv", "state"}
    assert {"token_hit_rate", "flops_saved", "states_written", "states_kept", "states_hit", "slo_violations"} <= set(
        one
    )


def test_a_block_caches_run_has_the_block_replays_numbers_and_another_has_none(run: PolicyResult) -> None:
    """Blocks of 4 tokens, room for 3: the second request hits two of its blocks, the last one partial."""
    paths = ((1, 2, 3), (1, 2), (4, 5, 6, 7))
    prompts = (11, 7, 16)
    requests = tuple(
        Request(pack(path), num_prompt, 0, num_prompt // 4 * 4, float(arrival_s))
        for arrival_s, (path, num_prompt) in enumerate(zip(paths, prompts, strict=True))
    )
    blocks = Trace("blocks", 4, requests)
    target = BlockServer("lru-block", 3 * (4 + worlds.STATE_BYTES), 4, worlds.COSTS)
    outcome = serial.replay(blocks, target, SecondAToken())
    task = Task(PolicySpec("lru-block"), 3 * (4 + worlds.STATE_BYTES))
    of_blocks = summarise(replace(INPUTS, trace=blocks), task, target, outcome).to_json(timings=False)
    names = {"overall_hit_rate": 7 / 34, "total_hit_tokens": 7, "total_prompt_tokens": 34, "final_cache_blocks": 3}
    assert names.items() <= of_blocks.items()
    assert not run.block_replay
    assert of_blocks.keys() - run.to_json(timings=False).keys() == names.keys()


def test_the_speed_of_the_replay_is_in_the_file_only_where_asked_for(run: PolicyResult) -> None:
    report = Report(INPUTS, None, (run,))
    assert report.to_json()["runs"][0]["requests_per_s"] is None
    assert report.to_json(timings=True)["runs"][0]["requests_per_s"] == run.requests_per_s > 0


def test_a_result_file_is_written_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for number in (1, 2):
        require_writable(path)
        assert list(tmp_path.iterdir()) == ([path] if number > 1 else [])
        write(path, {"number": number})
        assert json.loads(path.read_text()) == {"number": number}
        assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_earlier_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    write(path, {"number": 1})

    def full(self: Path, *_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=f"--json {path} cannot be written: No space left on device"):
        write(path, {"number": 2})
    monkeypatch.undo()
    assert json.loads(path.read_text()) == {"number": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_file_has_the_permissions_of_any_new_file_or_of_the_one_before(tmp_path: Path) -> None:
    path, other = tmp_path / "out.json", tmp_path / "other"
    write(path, {})
    other.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    path.chmod(0o640)
    write(path, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_link_is_kept_and_written_through(tmp_path: Path) -> None:
    (tmp_path / "real.json").touch()
    link = tmp_path / "link.json"
    link.symlink_to("real.json")
    require_writable(link)
    write(link, {"number": 1})
    assert link.is_symlink()
    assert json.loads((tmp_path / "real.json").read_text()) == {"number": 1}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the platform has no /dev/full")
def test_a_device_that_takes_nothing_is_named_and_stays() -> None:
    require_writable(Path("/dev/full"))
    with pytest.raises(OSError, match="--json /dev/full cannot be written: No space left on device"):
        write(Path("/dev/full"), {"number": 1})
    assert Path("/dev/full").is_char_device()
    write(Path(os.devnull), {"number": 1})
    assert Path(os.devnull).is_char_device()


def test_a_place_that_takes_no_file_is_refused_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(ValueError, match=r"out\.json cannot be written: Permission denied"):
        require_writable(tmp_path / "out.json")
