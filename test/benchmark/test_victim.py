"""The victim benchmark at tiny sizes: its figures' shape, its check of every victim, and bad input; never its times."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from .scripts import load


@pytest.fixture(scope="module")
def victim() -> ModuleType:
    return load("victim")


@pytest.mark.slow
def test_every_rule_is_measured_at_every_size_and_checked(
    victim: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "victim.json"
    assert victim.main(["--sizes", "60,30", "--num-victims", "40", "--json", str(path)]) == 0
    written = json.loads(path.read_text())["rules"]
    assert {name: list(by_size) for name, by_size in written.items()} == {name: ["30", "60"] for name in victim.RULES}
    for by_size in written.values():
        for figures in by_size.values():
            assert figures["num_timed"] >= 40
            assert figures["num_checked"] >= 200
            assert 0 < figures["median_us"] <= figures["p99_us"]
    assert "lru-joint" in capsys.readouterr().out


def test_a_rule_that_differs_from_its_definition_gets_no_figures(
    victim: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = replace(victim.RULES["lru-joint"], order=victim.RULES["seglen"].order)
    monkeypatch.setitem(victim.RULES, "lru-joint", wrong)
    path = tmp_path / "victim.json"
    arguments = ["--sizes", "100", "--rules", "lru-joint", "--num-victims", "10", "--json", str(path)]
    assert victim.main(arguments) == 1
    told = capsys.readouterr()
    assert "lru-joint at 100 nodes" in told.err
    assert "by definition" in told.err
    assert told.out == ""
    assert not path.exists()


def test_the_requests_are_the_same_every_time_and_sessions_go_on(victim: ModuleType) -> None:
    first, second = (victim.conversations(3, seed=7) for _ in range(2))
    requests = [next(first) for _ in range(200)]
    assert requests == [next(second) for _ in range(200)]
    last: dict[int, bytes] = {}
    for request in requests:
        if request.turn:
            assert request.path.startswith(last[request.session])
        last[request.session] = request.path
    assert {request.turn for request in requests} == set(range(16))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--sizes", "9"], "--sizes"),
        (["--sizes", "many"], "--sizes"),
        (["--rules", "lru,fifo"], "rules must be of lru, lru-joint, marconi, seglen"),
        (["--num-victims", "0"], "--num-victims 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    victim: ModuleType, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        victim.main(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
