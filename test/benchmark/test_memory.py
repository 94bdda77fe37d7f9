"""The benchmark of memory has a curve for each kind of server, none of which computes less than unlimited memory."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from .scripts import FOLDER, load


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return load("memory")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Conversations that take turns and grow by a block with each."""
    path = tmp_path / "turns.jsonl"
    lines = (
        {
            "timestamp": 1000 * (turn * 8 + conversation),
            "input_length": 512 * (turn + 2),
            "output_length": 9,
            "hash_ids": [100 * conversation + block for block in range(turn + 2)],
        }
        for turn in range(6)
        for conversation in range(8)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_every_kind_has_a_curve_above_that_of_unlimited_memory(
    benchmark: ModuleType, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "memory.json"
    options = ["--half", "all", "--model", "nemotron-h-8b", "--processes", "1", "--json", str(out)]
    assert benchmark.main([str(trace), *options]) == 0
    (curve,) = json.loads(out.read_text())["curves"]
    least = curve["recomputed_tokens"].pop(benchmark.UNLIMITED)
    assert list(curve["recomputed_tokens"]) == list(benchmark.KINDS)
    for counts in curve["recomputed_tokens"].values():
        assert len(counts) == len(benchmark.SHARES)
        assert min(counts) >= least
    assert len(set(curve["recomputed_tokens"]["stock"])) > 1, "memory matters"
    assert "unlimited memory" in capsys.readouterr().out


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="MATPLOTLIB IS NOT INSTALLED: make figures")
def test_it_is_drawn(benchmark: ModuleType, tmp_path: Path) -> None:
    counts = {kind: tuple(range(9_000_000, 1_000_000, -1_000_000)) for kind in benchmark.KINDS}
    curve = benchmark.Curve("a trace", "a model", tuple(10**9 * (index + 1) for index in range(8)), counts, 1_000_000)
    benchmark.plot([curve], tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_that_is_not_there_is_one_line(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["nowhere.jsonl"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("memory.py: error: ")
