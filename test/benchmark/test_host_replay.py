"""The host replay benchmark's own part: it serves what it says, and bad input is one line. Times are not asserted."""

import json
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from .scripts import load

pytestmark = pytest.mark.usefixtures("sglang_configuration")

POOLS = ["--kv-tokens", "40000", "--state-slots", "30"]


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    return load("host_replay")


@pytest.mark.parametrize("backend", ["stock", "marconi"])
def test_a_conversation_hits_all_but_its_newest_block(
    benchmark: ModuleType, trace: Path, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "replay.json"
    argv = ["--backend", backend, "--trace", str(trace), *POOLS, "--num-requests", "18", "--json", str(out)]
    assert benchmark.main(argv) == 0
    document = json.loads(out.read_text())
    hit, prompt = sum(512 * turn for turn in range(1, 18)), sum(512 * turn + 5 for turn in range(1, 19))
    assert document["backend"] == backend
    assert document["page_tokens"] == 512
    assert document["kv_tokens"] == 40000 // 512 * 512
    assert (document["requests"], document["prompt_tokens"]) == (18, prompt)
    assert (document["hit_tokens"], document["recomputed_tokens"]) == (hit, prompt - hit)
    assert document["states_written"] == 18
    assert document["evictions"] == 0
    assert {"match", "insert", "evict"} <= document["us_per"].keys()
    assert f"{100 * hit / prompt:.2f} %" in capsys.readouterr().out


def test_an_option_of_a_server_changes_the_replay(benchmark: ModuleType, trace: Path, tmp_path: Path) -> None:
    """Stock without tracking keeps a state at each prompt's exact end, five tokens into a block that goes on."""
    out = tmp_path / "replay.json"
    argv = ["--backend", "stock", "--strategy", "no_buffer", "--core", "python", "--trace", str(trace), *POOLS]
    assert benchmark.main([*argv, "--json", str(out)]) == 0
    document = json.loads(out.read_text())
    hit = sum(512 * turn + 5 for turn in range(1, 19))
    assert (document["page_tokens"], document["core"], document["hit_tokens"]) == (1, "python", hit)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--trace", "/no/such/trace", *POOLS], "no such file or folder"),
        (["--kv-tokens", "40000", "--state-slots", "2"], "num_state_slots must be at least 5"),
        (["--kv-tokens", "10", "--state-slots", "30"], "got 0"),
        ([*POOLS, "--num-requests", "0"], "--num-requests must be 1 or more, got 0"),
        ([*POOLS, "--page", "0"], "--page must be 1 or more, got 0"),
        ([*POOLS, "--model", "no-such-model"], "no-such-model"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    argv: list[str], message: str, benchmark: ModuleType, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = argv if "--trace" in argv else ["--trace", str(trace), *argv]
    assert benchmark.main(["--backend", "stock", *given]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
