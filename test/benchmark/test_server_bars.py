"""The server bars' own part: what it compares, in which pools, and bad input. How far ours is ahead is not asserted."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from .scripts import load

NUM_CONVERSATIONS, NUM_TURNS = 16, 10
BLOCK_TOKENS = 512
OPTIONS = ["--ratio", "0.2", "--memory", "0.5", "--model", "nemotron-h-8b"]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With threads for workers: a fork would copy whatever other tests have started here."""
    module = load("server_bars")
    monkeypatch.setattr(module, "ProcessPoolExecutor", ThreadPoolExecutor)
    return module


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations that take turns and grow by a block with each."""
    path = tmp_path / "turns.jsonl"
    lines = (
        {
            "timestamp": 1000 * (turn * NUM_CONVERSATIONS + conversation),
            "input_length": BLOCK_TOKENS * (turn + 2) + 5,
            "output_length": 9,
            "hash_ids": [100 * conversation + block for block in range(turn + 3)],
        }
        for turn in range(NUM_TURNS)
        for conversation in range(NUM_CONVERSATIONS)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_stock_and_ours_serve_the_reporting_half_in_the_same_pools_and_in_as_many_bytes(
    benchmark: ModuleType, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bars.json"
    assert benchmark.main([str(trace), *OPTIONS, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["benchmark"] == "server_bars"
    (row,) = document["rows"]
    assert (row["trace"], row["model"], row["memory"]) == ("turns.jsonl", "nemotron-h-8b", 0.5)
    assert row["requests"] == NUM_CONVERSATIONS * NUM_TURNS // 2
    assert row["planned_ratio"] == 0.2
    model = benchmark.load("nemotron-h-8b")
    pools = {
        0.9: (row["kv_tokens"], row["state_slots"]),
        0.2: (row["planned_kv_tokens"], row["planned_state_slots"]),
    }
    for ratio, (kv_tokens, state_slots) in pools.items():
        assert kv_tokens % BLOCK_TOKENS == 0
        spent = kv_tokens * model.kv_bytes_per_token + state_slots * model.checkpoint_bytes
        unspent = row["memory_bytes"] - spent
        assert 0 <= unspent < BLOCK_TOKENS * model.kv_bytes_per_token + model.checkpoint_bytes
        assert state_slots == int(row["memory_bytes"] * ratio / (1 + ratio) / model.checkpoint_bytes)


def test_one_pool_has_as_many_bytes_and_whatever_split_it_likes(
    benchmark: ModuleType, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recomputed = {}
    for ratio in ("joint", "100", "0.2"):
        out = tmp_path / f"{ratio}.json"
        assert benchmark.main([str(trace), *OPTIONS, "--ratio", ratio, "--json", str(out)]) == 0
        (row,) = json.loads(out.read_text())["rows"]
        recomputed[ratio] = row["planned"]["recomputed_tokens"]
    assert "joint" in capsys.readouterr().out
    assert recomputed["joint"] < recomputed["100"], "which has hardly any KV"


def test_what_is_recomputed_is_at_least_what_hindsight_cannot_save(
    benchmark: ModuleType, trace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bars.json"
    assert benchmark.main([str(trace), *OPTIONS, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    (row,) = document["rows"]
    stock, equal, planned = (row[kind]["recomputed_tokens"] for kind in ("stock", "equal", "planned"))
    first_turn = NUM_TURNS // 2
    num_prompt_tokens = sum(
        NUM_CONVERSATIONS * (BLOCK_TOKENS * (turn + 2) + 5) for turn in range(first_turn, NUM_TURNS)
    )
    assert row["bound_recomputed_tokens"] <= min(stock, equal) <= max(stock, equal) <= num_prompt_tokens
    # Nobody has seen a conversation's first turn of the half, and the newest of its blocks is in no other.
    newest = NUM_CONVERSATIONS * (BLOCK_TOKENS * (first_turn + 2) + 5 + (NUM_TURNS - first_turn - 1) * 517)
    assert row["bound_recomputed_tokens"] >= newest
    assert row["equal_over_stock"] == equal / stock
    assert row["planned_over_stock"] == planned / stock
    assert row["gap_closed"] == (stock - equal) / (stock - row["bound_recomputed_tokens"])
    assert all(row[kind]["too_large"] == 0 for kind in ("stock", "equal", "planned"))


def test_every_model_and_amount_of_memory_has_a_row_and_the_summary_is_over_all(
    benchmark: ModuleType, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bars.json"
    argv = [str(trace), "--ratio", "0.2", "--memory", "0.5", "--memory", "0.8", "--num-requests", "40"]
    assert benchmark.main([*argv, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    rows, total = document["rows"], document["summary"]
    assert [(row["model"], row["memory"]) for row in rows] == [
        (model, memory) for model in benchmark.MODELS for memory in (0.5, 0.8)
    ]
    assert all(row["requests"] == 40 for row in rows)
    ratios = [row["equal_over_stock"] for row in rows]
    assert total["equal_worst"] == max(ratios)
    assert total["equal_mean"] == pytest.approx(math.prod(ratios) ** (1 / len(ratios)))
    printed = capsys.readouterr()
    assert f"{total['equal_mean']:.3f}" in printed.out
    assert "turns.jsonl, nemotron-h-8b: done" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--ratio", "-1"], "--ratio must be a number above 0, got -1"),
        (["--memory", "0"], "--memory must be a number above 0, got 0.0"),
        (["--num-requests", "0"], "--num-requests must be 1 or more, got 0"),
        (["--processes", "0"], "--processes must be 1 or more, got 0"),
        (["--session-rate", "-1"], "session_rate must be a number of sessions a second, 1e-09 or more, got -1.0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    benchmark: ModuleType, trace: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main([str(trace), "--ratio", "0.2", "--num-requests", "8", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_trace_that_is_not_there_is_one_line_and_status_2(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(["/no/such/trace", "--ratio", "0.2"]) == 2
    error = capsys.readouterr().err
    assert "/no/such/trace" in error
    assert error.count("\n") == 1


def test_a_draft_head_takes_the_kv_of_one_more_attention_layer(
    benchmark: ModuleType, trace: Path, tmp_path: Path
) -> None:
    out, kv_tokens = tmp_path / "bars.json", []
    for drafts in ([], ["--drafts"]):
        assert benchmark.main([str(trace), *OPTIONS, *drafts, "--json", str(out)]) == 0
        (row,) = json.loads(out.read_text())["rows"]
        kv_tokens.append(row["kv_tokens"])
    num_layers = next(kind.num_layers for kind in benchmark.load("nemotron-h-8b").kinds if kind.kv_bytes_per_token)
    assert abs(kv_tokens[0] * num_layers / (num_layers + 1) - kv_tokens[1]) < BLOCK_TOKENS
