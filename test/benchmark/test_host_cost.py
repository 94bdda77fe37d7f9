"""The host cost benchmark at small sizes: what it measures, of whom, its bars, and bad input; never its times."""

import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from .scripts import load

pytestmark = pytest.mark.usefixtures("sglang_configuration")

CONTENDERS = {"python", "rust", "lru", "marconi", "best"}
TIERS = {"no tier", "tier", "tier, with the copy"}
QUEUES = {"untold", "nobody waits", "16 wait"}


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load("host_cost")


@pytest.mark.slow
def test_every_cache_is_measured_at_everything(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "host_cost.json"
    argv = ["--tokens", "2000", "--sizes", "200,100", "--waiting", "16", "--rounds", "1", "--json", str(path)]
    assert benchmark.main(argv) == 0
    document = json.loads(path.read_text())
    assert set(document["match"]) == {"alone", "among 1,000 others", "grown by 500"}
    assert all(set(row) == {"python", "rust", "marconi"} for row in document["match"].values())
    assert set(document["extend"]) == {"all", "plan", "insert", "match"}
    assert all(set(row) == CONTENDERS for row in document["extend"].values())
    assert {need: list(by_size) for need, by_size in document["victim"].items()} == {
        "state": ["100", "200"],
        "kv": ["100", "200"],
    }
    timed = [*document["match"].values(), *document["extend"].values()]
    for by_size in document["victim"].values():
        assert all(set(row) == CONTENDERS for row in by_size.values())
        timed += by_size.values()
    assert {need: set(row) for need, row in document["tier"].items()} == dict.fromkeys(("state", "kv"), TIERS)
    timed += document["tier"].values()
    for rows in document["queue"].values():
        assert set(rows) == set(benchmark.QUEUE_PARTS)
        for part, row in rows.items():
            once = part in benchmark.ONCE
            assert {name for name, figures in row.items() if figures} == ({"16 wait"} if once else QUEUES), part
            timed.append({name: figures for name, figures in row.items() if figures})
    assert set(document["queue"]) == {"all different", "in groups"}
    assert all(figures["num_timed"] > 0 for row in timed for figures in row.values())
    assert all(figures["median_us"] <= figures["p95_us"] for row in timed for figures in row.values())
    assert all(bar["holds"] is (bar["value"] <= bar["limit"]) for bar in document["bars"])
    assert set(document["tick"]) == {"a tick", "none is due"}
    assert len(document["bars"]) == 3 + 1 + 2 * 3 * 2 + 2 * 2 + 2 + 1
    assert "ours over the Rust core" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stock_cache_that_takes_too_long_is_left_out_and_ours_never_is(benchmark: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "host_cost.json"
    argv = ["--tokens", "1000", "--sizes", "100,200", "--waiting", "16", "--rounds", "1", "--box-s", "1e-9"]
    assert benchmark.main([*argv, "--json", str(path)]) == 0
    for by_size in json.loads(path.read_text())["victim"].values():
        for row in by_size.values():
            assert {name for name, figures in row.items() if figures is None} == {"python", "rust"}


def test_victims_are_replaced_so_that_the_tree_keeps_its_size(benchmark: ModuleType) -> None:
    contender = benchmark.contend("marconi", benchmark.Forest.host(120))
    forest = benchmark.Forest("marconi", contender.replay, contender.clock, 120, seed=1)
    assert forest.fill(float("inf"))
    for need in benchmark.NEEDS:
        for _ in range(30):
            forest.evict(need)
            assert forest.cache.mamba_evictable_size() >= 120
    forest.cache.sanity_check()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--tokens", "999"], "--tokens 999"),
        (["--sizes", "99"], "--sizes"),
        (["--sizes", "many"], "--sizes"),
        (["--rounds", "0"], "--rounds 0"),
        (["--waiting", "15"], "--waiting 15"),
        (["--box-s", "0"], "--box-s 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    benchmark: ModuleType, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
