"""The benchmark of the hooks' host time, in a process of its own: what it measures, and bad input; never its times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from .scripts import FOLDER, load


@pytest.mark.slow
def test_states_inside_and_at_the_end_are_written_by_every_layer_and_measured(tmp_path: Path) -> None:
    """It raises for a layer that did not write them."""
    path = tmp_path / "deep" / "hook_cost.json"
    command = [sys.executable, str(FOLDER / "hook_cost.py"), "--rounds", "1", "--check", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    document = json.loads(path.read_text())
    assert document["layer_us"] > 0
    is_within = (
        max(document[f"{name}_us"] for name in ("idle", "inside", "end"))
        <= load("hook_cost").MAX_ADDED * document["layer_us"]
    )
    assert done.returncode == (0 if is_within else 1), done.stderr
    assert "hooks installed, nothing planned" in done.stdout
    assert "a state at the end" in done.stdout


def test_bad_input_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("hook_cost").main(["--rounds", "0"])
    assert ended.value.code == 2
    assert "--rounds 0" in capsys.readouterr().err
