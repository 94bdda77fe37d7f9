"""The serving benchmark's own part: the trace that it writes, and what it makes of malformed ones."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from .scripts import FOLDER, load

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

SCRIPT = FOLDER / "serving.py"


@pytest.fixture(scope="module")
def serving() -> ModuleType:
    return load("serving")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_made_up_sessions_grow_and_share_their_beginning(serving: ModuleType, tmp_path: Path) -> None:
    serving.write_trace(None, tmp_path / "a", 16)
    serving.write_trace(None, tmp_path / "b", 16)
    records = lines_of(tmp_path / "a")
    assert records == lines_of(tmp_path / "b")
    assert len(records) == 16
    assert all(record["hash_ids"][0] == 0 for record in records)  # type: ignore[index]
    assert [record["timestamp"] for record in records] == [500 * i for i in range(16)]


def test_the_head_of_a_trace_is_cut_to_what_a_small_model_serves(serving: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "trace.jsonl.gz"
    record = {"timestamp": 27, "input_length": 6758, "output_length": 500, "hash_ids": list(range(14))}
    with gzip.open(source, "wt") as lines:
        lines.write(f"{json.dumps(record)}\n" * 5)
    serving.write_trace(source, tmp_path / "out", 3)
    head = lines_of(tmp_path / "out")
    assert len(head) == 3
    assert head[0] == {"timestamp": 0, "input_length": 4096, "output_length": 32, "hash_ids": list(range(8))}


def test_the_median_of_rounds_is_that_of_each_figure(serving: ModuleType) -> None:
    rounds = [
        serving.Figures(8, 100, cached, rate, {"p50": first}) for cached, rate, first in ((9, 2.0, 7.0), (3, 9.0, 5.0))
    ]
    assert serving.Figures.median(rounds) == serving.Figures(8, 100, 6, 5.5, {"p50": 6.0})


def test_figures_are_printed_as_they_are_measured(serving: ModuleType) -> None:
    figures = serving.Figures(8, 200, 33, 2.5, {"p50": 71.6, "mean": 80.0, "p95": 90.2})
    assert str(figures) == "16.5% cached, first token after 72 ms (median) and 90 (P95), 2.50 requests a second"


def test_a_large_model_has_a_tokenizer_and_no_weights(serving: ModuleType, tmp_path: Path) -> None:
    serving.write_model(tmp_path / "large", is_large=True)
    config = json.loads((tmp_path / "large" / "config.json").read_text())
    assert serving.LARGE.items() <= config.items()
    assert config["vocab_size"]
    names = {each.name for each in (tmp_path / "large").iterdir()}
    assert "tokenizer.json" in names
    assert "model.safetensors" not in names


@pytest.mark.parametrize("line", ["{", "[]", '{"output_length": 5}', '{"output_length": "x", "hash_ids": []}'])
def test_a_malformed_line_is_named(serving: ModuleType, tmp_path: Path, line: str) -> None:
    source = tmp_path / "trace.jsonl"
    source.write_text(f'{{"output_length": 1, "hash_ids": [1]}}\n{line}\n')
    with pytest.raises(ValueError, match=r"trace\.jsonl:2: not a line of a Mooncake trace"):
        serving.write_trace(source, tmp_path / "out", 5)


@pytest.mark.slow
def test_a_missing_trace_is_one_line(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone.jsonl")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--mooncake", gone],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line]
    assert line.startswith("serving.py: error: ")
    assert gone in line
