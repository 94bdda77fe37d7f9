"""`marconi replay` as a user meets it: tables, result files that repeat to the byte, and errors of one line."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baselines.block_replays import replay as replay_blocks
from marconi.cli import main
from marconi.model import load
from marconi.replay.catalog import known_policies
from marconi.replay.trace import read, write
from marconi_lab.block import make

from .worlds import conversations

MODEL = ("--model", "nemotron-h-8b")
SMALL = (*MODEL, "--memory", "0.2x")
HOSTED = (*SMALL, "--host-memory", "0.2x")
A_BLOCK_BYTES = 512 * load("nemotron-h-8b").kv_bytes_per_token + load("nemotron-h-8b").checkpoint_bytes
NUMBERS = ("overall_hit_rate", "total_hit_tokens", "total_prompt_tokens", "final_cache_blocks")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.jsonl.gz"
    lines = (
        {
            "timestamp": round(1000 * each.arrival_s),
            "input_length": each.num_prompt_tokens,
            "output_length": each.num_output_tokens,
            "hash_ids": [int.from_bytes(each.path[i : i + 4], "little") for i in range(0, num_prompt_bytes(each), 4)],
        }
        for each in conversations(unit_tokens=512).requests
    )
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def num_prompt_bytes(request: Any) -> int:
    return int(request.num_prompt_tokens) // 512 * 4


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with status 2 and one line; returns the line."""

    def run(*argv: str) -> str:
        try:
            status = main(argv)
        except SystemExit as ended:
            status = ended.code  # type: ignore[assignment]
        captured = capsys.readouterr()
        assert status == 2
        assert captured.out == ""
        assert captured.err.startswith("marconi")
        assert captured.err.count("\n") == 1, captured.err
        return captured.err

    return run


def test_the_table_and_the_file_hold_every_policy_at_every_memory(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    policies = ["lru", "lru-joint", "marconi-static:0.5", "lru-block"]
    argv = ["replay", str(trace), *MODEL, "--memory", "2GB,0.5x", "--policy", ",".join(policies), "--json", str(out)]
    assert main(argv) == 0
    document = json.loads(out.read_text())
    assert (document["trace"], document["model"], document["seed"]) == (trace.name, "nemotron-h-8b", 0)
    memories = [2 * 10**9, document["unbounded_bytes"] // 2]
    expected = [(name, memory) for memory in memories for name in policies]
    assert [(run["policy"], run["memory_bytes"]) for run in document["runs"]] == expected
    table = capsys.readouterr().out
    for word in (*policies, "hit rate", "FLOPs saved", "TTFT p50", "evictions", "states kept", "> 1 s"):
        assert word in table
    assert main([*argv[:-1], "-"]) == 0
    assert json.loads(capsys.readouterr().out) == document, "it is alone on stdout"
    assert not Path("-").exists()


def test_block_caches_of_so_many_blocks_give_the_block_replays_numbers_by_name(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    names, capacities = ["s3fifo", "lfu", "lru-block"], [25, 2]
    memory = ",".join(f"{capacity}blocks" for capacity in capacities)
    argv = ["replay", str(trace), *MODEL, "--memory", memory, "--policy", ",".join(names), "--json", str(out)]
    assert main(argv) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines.count(["policy", *NUMBERS]) == len(capacities)
    blocks = read(str(trace))
    runs = iter(json.loads(out.read_text())["runs"])
    hits = set()
    for capacity in capacities:
        for name in names:
            run = next(runs)
            expected = replay_blocks(blocks, make(name, capacity))
            assert expected.keys() == set(NUMBERS)
            assert {number: run[number] for number in NUMBERS} == expected
            assert run["overall_hit_rate"] == run["token_hit_rate"]
            assert run["memory_bytes"] == capacity * A_BLOCK_BYTES
            assert run["final_cache_blocks"] == run["states_kept"]
            assert name == "s3fifo" or run["states_kept"] == capacity
            rate, *counts = expected.values()
            assert [name, f"{rate:.6f}", *map(str, counts)] in lines
            hits.add(run["total_hit_tokens"])
    assert len(hits) > 3


def test_blocks_and_bytes_in_one_list_are_the_same_memory_and_only_block_caches_have_the_numbers(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def runs(memory: str, policies: str) -> list[dict[str, Any]]:
        out = tmp_path / "out.json"
        assert main(["replay", str(trace), *MODEL, "--memory", memory, "--policy", policies, "--json", str(out)]) == 0
        found: list[dict[str, Any]] = json.loads(out.read_text())["runs"]
        return found

    num_bytes = 25 * A_BLOCK_BYTES
    in_blocks, in_bytes = runs(f"25blocks,{num_bytes}B", "lfu")
    assert in_blocks == in_bytes
    capsys.readouterr()
    tree, of_blocks = runs(f"{num_bytes}B", "lru-joint,lfu")
    assert of_blocks == in_blocks
    assert tree.keys().isdisjoint(NUMBERS)
    assert capsys.readouterr().out.count("overall_hit_rate") == 1
    runs(f"{num_bytes}B", "lru-joint")
    assert "overall_hit_rate" not in capsys.readouterr().out


def test_a_drawn_workload_is_replayed_in_blocks_where_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Callable[..., str]
) -> None:
    drawn = ("replay", "generate:chat-short", "--max-sessions", "3", *MODEL, "--memory", "9blocks", "--policy", "lfu")
    assert "--block-tokens N, 2 or more" in fails(*drawn)
    assert "--block-tokens N, 2 or more" in fails(*drawn, "--block-tokens", "1")
    assert main([*drawn, "--block-tokens", "16"]) == 0
    assert "final_cache_blocks" in capsys.readouterr().out


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mode", ["serial", "queueing"])
def test_the_same_input_and_seed_give_the_same_bytes(
    mode: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = set()
    for jobs in ("1", "1", "2"):
        out = tmp_path / "out.json"
        policies = "lru,marconi,seglen,static-oracle"
        argv = ["replay", str(trace), *SMALL, "--policy", policies, "--mode", mode, "--jobs", jobs, "--json", str(out)]
        assert main(argv) == 0
        seen.add((out.read_bytes(), capsys.readouterr().out))
    assert len(seen) == 1


def test_another_seed_draws_another_trace(tmp_path: Path) -> None:
    def result(seed: str) -> dict[str, Any]:
        out = tmp_path / f"{seed}.json"
        argv = ["replay", "generate:chat-short", "--max-sessions", "5", *SMALL, "--policy", "lru", "--seed", seed]
        assert main([*argv, "--json", str(out)]) == 0
        document: dict[str, Any] = json.loads(out.read_text())
        return document

    assert result("1")["seed"] == 1
    assert result("1")["runs"] != result("2")["runs"]


def test_a_written_trace_replays_as_the_one_that_was_drawn(tmp_path: Path) -> None:
    what = conversations(unit_tokens=1)
    path = tmp_path / "written.jsonl"
    write(what, path, "artifact")
    out = tmp_path / "out.json"
    assert main(["replay", str(path), *SMALL, "--policy", "lru-joint", "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["num_requests"] == len(what.requests)
    assert run["prompt_tokens"] == sum(each.num_prompt_tokens for each in what.requests)


def test_the_best_of_several_says_which_it_was(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = ["replay", str(trace), *SMALL, "--policy", "static-oracle,marconi-static:0,marconi-static:0.0759375"]
    assert main([*argv, "--json", str(out)]) == 0
    oracle, *others = json.loads(out.read_text())["runs"]
    assert oracle["policy"] == "static-oracle"
    assert oracle["chosen"].startswith("marconi-static:")
    assert all(oracle["hit_tokens"] >= other["hit_tokens"] for other in others)


def test_the_replays_own_speed_is_reported_where_asked_for(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    argv = ["replay", str(trace), *SMALL, "--policy", "lru", "--json", str(out)]
    assert main(argv) == 0
    assert json.loads(out.read_text())["runs"][0]["requests_per_s"] is None
    assert "requests/s" not in capsys.readouterr().out
    assert main([*argv, "--timings"]) == 0
    assert json.loads(out.read_text())["runs"][0]["requests_per_s"] > 0
    assert "requests/s" in capsys.readouterr().out


def test_the_objective_decides_what_violates_it(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    def violations(slo_s: str) -> int:
        argv = ["replay", str(trace), *SMALL, "--policy", "lru", "--slo-s", slo_s, "--json", str(out)]
        assert main(argv) == 0
        return int(json.loads(out.read_text())["runs"][0]["slo_violations"])

    assert violations("0.001") == len(conversations().requests)
    assert violations("1000") == 0


def test_a_measured_table_takes_the_place_of_the_device(trace: Path, tmp_path: Path) -> None:
    table, out = tmp_path / "measured.csv", tmp_path / "out.json"
    table.write_text("uncached_tokens,seconds\n1,5.0\n1000000,5.0\n")
    argv = ["replay", str(trace), *SMALL, "--policy", "lru", "--latency-table", str(table), "--json", str(out)]
    assert main(argv) == 0
    document = json.loads(out.read_text())
    assert document["device"] == "measured.csv"
    assert document["runs"][0]["ttft_s"] == {"p50": 5.0, "p95": 5.0, "p99": 5.0}


def test_a_request_larger_than_the_memory_is_counted(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["replay", str(trace), *MODEL, "--memory", "1KB", "--policy", "lru-joint", "--json", str(out)]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    assert run["num_requests_too_large"] == run["num_requests"]
    assert run["held_bytes"] == run["states_written"] == 0


def test_a_bad_line_is_named_and_skipped_only_where_asked_for(
    trace: Path, fails: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = gzip.decompress(trace.read_bytes()).splitlines(keepends=True)
    lines[4] = lines[4][:20] + b"\n"
    trace.write_bytes(gzip.compress(b"".join(lines)))
    assert f"{trace}, line 5: " in fails("replay", str(trace), *SMALL)
    assert main(["replay", str(trace), *SMALL, "--policy", "lru", "--skip-bad"]) == 0
    told = capsys.readouterr().err
    assert f"skipped: {trace}, line 5: " in told
    assert "skipped 1 bad record\n" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*MODEL, "--memory", "0B"), "memory must be more than 0 bytes, got '0B'"),
        ((*MODEL, "--memory", "8"), "memory must be a size with a unit such as 8GB, got '8'"),
        ((*MODEL, "--memory=-1GB"), "memory must be a number above 0"),
        ((*MODEL, "--memory", "-1GB"), "memory must be a number above 0"),
        ((*MODEL, "--memory", "much"), "memory must be a number above 0"),
        (("--model", "gpt-9", "--memory", "1GB"), "a model must be a config.json, its folder or one of"),
        ((*SMALL, "--policy", "lru,lry"), "a policy must be one of lru, marconi, tail, best, lru-write-back"),
        ((*SMALL, "--policy", "lru", "--policy", "lru"), "--policy must name each policy once, got 'lru,lru'"),
        ((*SMALL, "--policy", ""), "a policy must be NAME, NAME:NUMBER or FILE.py:RULE, each perhaps"),
        ((*SMALL, "--policy", "lru@never"), "an admission must be one of"),
        ((*SMALL, "--policy", "lru@judicious:100"), "GRID must be a multiple of the trace's unit, 512 tokens, got 100"),
        (
            (*SMALL, "--policy", "lru,lru@judicious:100", "--jobs", "2"),
            "GRID must be a multiple of the trace's unit, 512 tokens, got 100",
        ),
        ((*SMALL, "--policy", "s3fifo", "--mode", "queueing"), "--mode must be serial"),
        (
            (*MODEL, "--memory", "9blocks", "--policy", "lfu,lru"),
            "memory must be an amount of bytes such as 40GB for policy 'lru', got '9blocks'",
        ),
        (
            (*MODEL, "--memory", "1GB,9blocks"),
            "memory must be an amount of bytes such as 40GB for policy 'lru', got '9blocks'",
        ),
        (
            (*MODEL, "--memory", "9blocks", "--policy", "lfu,lry"),
            "a policy must be one of lru, marconi, tail, best, lru-write-back",
        ),
        (
            (*MODEL, "--memory", "0blocks", "--policy", "lfu"),
            "memory in blocks must be a whole number, 1 or more, as 3000blocks, got '0blocks'",
        ),
        ((*MODEL, "--memory", "1blocks", "--policy", "s3fifo"), "the capacity in blocks must be at least 2, got 1"),
        ((*MODEL, "--memory", "9blocks", "--policy", "lfu", "--mode", "queueing"), "--mode must be serial"),
        ((*SMALL, "--device", "abacus"), "a device must be one of"),
        ((*SMALL, "--format", "tablets"), "got 'tablets'"),
        ((*SMALL, "--mamba-full-memory-ratio", "0"), "--mamba-full-memory-ratio must be a number above 0, got 0.0"),
        ((*SMALL, "--slo-s", "nan"), "--slo-s must be a number of seconds above 0, got nan"),
        ((*SMALL, "--jobs", "0"), "must be a whole number, 1 or more, got '0'"),
        (
            (*SMALL, "--session-rate", "-1"),
            "session_rate must be a number of sessions a second, 1e-09 or more, got -1.0",
        ),
        ((*SMALL, "--mode", "dream"), "invalid choice: 'dream'"),
        ((*SMALL, "--json", "/nowhere/at/all.json"), "--json must be in an existing folder, got /nowhere/at/all.json"),
        ((*SMALL, "--json", "/proc/x.json"), "--json /proc/x.json cannot be written: "),
        (
            (*SMALL, "--policy", "lru,s3fifo", "--mamba-full-memory-ratio", "0.5"),
            "policy 's3fifo': --mamba-full-memory-ratio must be left out for a block cache",
        ),
        (
            ("--model", "vicuna-7b", "--memory", "1GB", "--mamba-full-memory-ratio", "0.5"),
            "--mamba-full-memory-ratio must be left out for a model without states, got 0.5",
        ),
        ((*SMALL, "--policy", "lru,et-lru"), "policy 'et-lru': trace 'small.jsonl.gz' must have a session"),
        ((*SMALL, "--policy", "lru,end-aware"), "policy 'end-aware': no request names its session"),
        ((*SMALL, "--policy", "lru,length-aware:9"), "policy 'length-aware:9': no request names its session"),
        ((*SMALL, "--policy", "lru,tlru:1.9"), "policy 'tlru:1.9': tlru:XI must be a whole number"),
        ((*SMALL, "--latency-table", "/nowhere.csv"), "/nowhere.csv cannot be read"),
        ((*SMALL, "--host-memory", "5"), "--host-memory: memory must be a size with a unit such as 5GB, got '5'"),
        ((*SMALL, "--host-memory", "9blocks"), "--host-memory must be an amount of bytes, as 200GB, got '9blocks'"),
        ((*SMALL, "--host-bandwidth", "0"), "--host-bandwidth must be a number of GB/s above 0, got 0"),
        (
            (*SMALL, "--policy", "lfu", "--host-memory", "9GB"),
            "policy 'lfu': --host-memory must be left out for a block cache",
        ),
        (
            ("--model", "vicuna-7b", "--memory", "1GB", "--host-memory", "1GB"),
            "--host-memory must be left out for a model without states",
        ),
        ((*SMALL, "--storage-memory", "2TB"), "--storage-memory must come with --host-memory, got '2TB' alone"),
        ((*HOSTED, "--storage-memory", "0GB"), "--storage-memory: memory must be more than 0 bytes, got '0GB'"),
        ((*HOSTED, "--storage-memory", "1x"), "--storage-memory must be an amount of bytes, as 2TB, got '1x'"),
        ((*HOSTED, "--storage-bandwidth", "6"), "--storage-bandwidth must come with --storage-memory, got 6 alone"),
        (
            (*HOSTED, "--storage-memory", "2TB", "--storage-bandwidth", "-1"),
            "--storage-bandwidth must be a number of GB/s above 0, got -1",
        ),
        ((*HOSTED, "--storage-memory", "2TB", "--policy", "lru"), "policy 'lru': --storage-memory must be left out"),
        (
            (*HOSTED, "--storage-memory", "2TB", "--int8-checkpoints"),
            "--host-memory must be left out with --int8-checkpoints",
        ),
        (
            (*HOSTED, "--storage-memory", "2TB", "--policy", "best", "--replicas", "2"),
            "--storage-memory must be left out with --replicas",
        ),
        (SMALL[:2], "the following arguments are required: --memory"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(
    options: tuple[str, ...], message: str, trace: Path, fails: Callable[..., str]
) -> None:
    assert message in fails("replay", str(trace), *options)


def test_a_list_that_is_given_in_parts_is_one_list(trace: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    argv = ["replay", str(trace), *MODEL]
    assert main([*argv, "--memory", "1GB,2GB", "--policy", "lru,best,seglen", "--json", str(whole)]) == 0
    again = ["--memory", "1GB", "--policy", "lru", "--policy", "best,seglen", "--memory", "2GB"]
    assert main([*argv, *again, "--json", str(parts)]) == 0
    assert parts.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("mode", ["serial", "queueing"])
def test_a_host_tier_hits_more_and_its_loads_are_counted(
    mode: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"

    def runs(*options: str) -> list[dict[str, Any]]:
        argv = ["replay", str(trace), *MODEL, "--memory", "0.1x", "--policy", "lru,lru-write-back,best", "--mode", mode]
        assert main([*argv, "--json", str(out), *options]) == 0
        found: list[dict[str, Any]] = json.loads(out.read_text())["runs"]
        return found

    without = runs()
    assert "loading" not in capsys.readouterr().out
    tiered = runs("--host-memory", "1x")
    assert "loading" in capsys.readouterr().out
    for before, after in zip(without, tiered, strict=True):
        assert (before["loads"], before["load_s"]) == (0, 0)
        assert after["hit_tokens"] > before["hit_tokens"]
        assert after["loads"] > 0
        assert after["load_s"] > 0
        assert after["prefill_s"] < before["prefill_s"]
    slow = runs("--host-memory", "1x", "--host-bandwidth", "1e-6")
    assert slow[-1]["loads"] == 0
    assert slow[-1]["hit_tokens"] == without[-1]["hit_tokens"]


@pytest.mark.parametrize("mode", ["serial", "queueing"])
def test_a_store_behind_the_host_hits_more_and_is_shown_where_one_is_asked_for(
    mode: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"

    def run(*options: str) -> tuple[dict[str, Any], str]:
        argv = ["replay", str(trace), *MODEL, "--memory", "0.1x", "--host-memory", "0.1x", "--policy", "best"]
        assert main([*argv, "--mode", mode, "--json", str(out), *options]) == 0
        (found,) = json.loads(out.read_text())["runs"]
        return found, capsys.readouterr().out

    without, printed = run()
    assert "storage" not in printed + out.read_text()
    stored, printed = run("--storage-memory", "1TB", "--storage-bandwidth", "20")
    assert "on the host and 1 TB of storage at 20 GB/s behind it" in printed
    assert all(column in printed for column in ("tokens from storage", "written", "read", "reading"))
    assert stored["hit_tokens"] > without["hit_tokens"]
    assert stored["prefill_s"] < without["prefill_s"]
    assert (stored["storage_memory_bytes"], stored["storage_bytes_per_s"]) == (10**12, 20e9)
    assert 0 < stored["storage_hit_tokens"] <= stored["hit_tokens"]
    assert stored["storage_writes"] > 0
    assert stored["storage_reads"] > 0
    assert stored["storage_read_s"] == pytest.approx(stored["storage_read_bytes"] / 20e9)
    if mode == "serial":
        assert stored["token_hit_rate"] <= stored["bound_token_hit_rate"]
    assert stored.keys() - without.keys() == {key for key in stored if key.startswith("storage_")}


@pytest.mark.parametrize("command", ["replay", "plan"])
def test_a_trace_that_is_not_there_is_one_line(command: str, tmp_path: Path, fails: Callable[..., str]) -> None:
    assert "no such file or folder" in fails(command, str(tmp_path / "none"), *SMALL)
    assert "got 'poetry'" in fails(command, "generate:poetry", *SMALL)
    assert "--half must be all for a drawn trace, got tuning" in fails(
        command, "generate:chat-short", *SMALL, "--half", "tuning"
    )


def test_every_policy_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["replay", "--list-policies"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(known_policies())
    assert all(policy.summary in line for policy, line in zip(known_policies().values(), listed, strict=True))


def test_help_says_how_many_blocks_are_asked_for_and_of_which_policies(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    block_caches = ", ".join(policy.name for policy in known_policies().values() if policy.caches_blocks)
    # A long name may be broken at its hyphen.
    assert f"3000blocks for block caches ({block_caches})".replace(" ", "") in text.replace(" ", "")


def test_help_says_where_the_replays_own_speed_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    for command, says in (("replay", "requests_per_s is null without --timings"), ("plan", "is always null")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert says in " ".join(capsys.readouterr().out.split())


def test_a_result_file_that_cannot_be_made_is_refused_before_the_trace_is_read(fails: Callable[..., str]) -> None:
    assert "--json /proc/x.json cannot be written" in fails("replay", "/nowhere", *SMALL, "--json", "/proc/x.json")
    assert "--json /proc/x.json cannot be written" in fails("plan", "/nowhere", *SMALL, "--json", "/proc/x.json")


def test_a_plan_takes_no_number_of_blocks(trace: Path, fails: Callable[..., str]) -> None:
    assert "memory must be an amount of bytes such as 40GB for policy 'lru', got '9blocks'" in fails(
        "plan", str(trace), *MODEL, "--memory", "9blocks"
    )


def test_a_file_of_tokens_is_cut_into_blocks_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = tmp_path / "tokens.jsonl"
    write(conversations(), tokens, "artifact")
    argv = ["replay", str(tokens), *MODEL, "--memory", "20blocks", "--policy", "lru-block", "--block-tokens", "16"]
    assert main(argv) == 0
    assert "overall_hit_rate" in capsys.readouterr().out


def test_an_unknown_admission_is_refused_before_the_trace_is_read(fails: Callable[..., str]) -> None:
    assert "an admission must be one of" in fails("replay", "/nowhere", *SMALL, "--policy", "lru@never")
