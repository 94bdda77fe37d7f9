"""The soak benchmark's own part: it says what there was and what failed, and bad input is one line."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from .scripts import load

pytestmark = pytest.mark.usefixtures("sglang_configuration")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load("host_soak")


@pytest.mark.parametrize("backend", ["stock", "marconi"])
def test_it_serves_what_it_says(benchmark: ModuleType, backend: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert benchmark.main(["--num-requests", "30", "--seed", "4", "--backend", backend, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert (document["requests"], document["seed"], document["failure"]) == (30, 4, None)
    assert sum(document["origins"].values()) == 30
    assert sum(number for outcome, number in document["outcomes"].items() if outcome != "retracted") == 30
    assert ("evictions" in document) == (backend == "marconi")


def test_it_serves_from_one_pool_too(benchmark: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert benchmark.main(["--num-requests", "60", "--memory", "one-pool", "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    assert (document["memory"], document["failure"]) == ("one-pool", None)
    assert document["evictions"]["bytes"] > 0
    assert benchmark.main(["--num-requests", "1", "--memory", "one-pool", "--admission", "chunk-end"]) == 2


def test_a_leak_is_told_with_the_seed_and_the_step(
    benchmark: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build_leaking(args: Any) -> Any:
        soak = build(args)
        soak.scheduler.cache.req_to_token_pool.mamba_allocator.free = lambda _slots: None
        return soak

    build = benchmark.build
    monkeypatch.setattr(benchmark, "build", build_leaking)
    out = tmp_path / "out.json"
    assert benchmark.main(["--num-requests", "30", "--seed", "4", "--json", str(out)]) == 1
    failure = json.loads(out.read_text())["failure"]
    assert failure.startswith("seed 4, step ")
    assert "lost" in failure
    assert "seed 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-requests", "0"], "requests must be 1 or more, got 0"),
        (["--check-every", "0"], "steps from check to check must be 1 or more, got 0"),
        (["--page", "0"], "--page must be 1 or more, got 0"),
        (["--page", "16", "--strategy", "no_buffer"], "SGLang wants pages of 1"),
        (["--page", "7"], "num_kv_tokens must be a multiple of the page, 7, got 480"),
        (["--num-requests", "1", "--json", "/nowhere/out.json"], "/nowhere/out.json"),
    ],
)
def test_bad_input_is_one_line(
    benchmark: ModuleType, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
