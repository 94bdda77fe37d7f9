"""The replay benchmark's own part: it replays what it says, and bad input is one line. Rates are not asserted."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from .scripts import load


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load("replay")


def test_every_policy_is_timed_on_the_whole_trace(
    benchmark: ModuleType, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rates.json"
    argv = [str(trace), "--policy", "lru-joint,seglen", "--memory", "1TB", "--repeat", "1", "--json", str(out)]
    assert benchmark.main(argv) == 0
    document = json.loads(out.read_text())
    assert document["num_requests"] == 19
    assert [rate["policy"] for rate in document["rates"]] == ["lru-joint", "seglen"]
    # Every turn starts from the whole blocks of the one before it.
    hits, prompts = sum(512 * turn for turn in range(1, 19)), sum(512 * turn + 5 for turn in range(1, 20))
    assert all(rate["token_hit_rate"] == pytest.approx(hits / prompts) for rate in document["rates"])
    assert all(rate["requests_per_s"] > 0 for rate in document["rates"])
    assert "lru-joint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["/no/such/trace"], "no such file or folder"),
        (["--policy", "static-oracle"], "best of several"),
        (["--policy", "lry"], ", got 'lry'"),
        (["--memory", "0GB"], "memory must be more than 0 bytes"),
        (["--repeat", "0"], "--repeat must be 1 or more, got 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    argv: list[str], message: str, benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
