"""The benchmark of events at small sizes: what it measures, and bad input; never its times."""

import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from marconi.events import publisher

from .scripts import load

pytestmark = pytest.mark.usefixtures("sglang_configuration")


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load("events")


def test_requests_are_measured_with_and_without_and_slices_of_every_size(
    benchmark: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, real = tmp_path / "deep" / "events.json", publisher.time
    assert benchmark.main(["--requests", "5", "--rounds", "2", "--blocks", "20,40", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    request = document["request"]
    assert request["without_us"] > 0
    assert request["with_us"] > 0
    assert request["num_changes"] >= 2
    assert len(document["slices"]) == 3 * 2
    assert all(row["num_slices"] >= 1 and row["longest_ms"] >= row["median_ms"] for row in document["slices"].values())
    assert "a snapshot of 40" in capsys.readouterr().out
    assert publisher.time is real


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(["--requests", "0"], "--requests 0"), (["--rounds", "0"], "--rounds 0"), (["--blocks", "9"], "--blocks")],
)
def test_bad_input_is_one_line_and_status_2(
    benchmark: ModuleType, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err
