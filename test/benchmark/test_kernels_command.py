"""The command of the kernels' benchmark: the refusal, both kinds of machine, the file, and bad input."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the server extra is not installed: pip install '.[server]'")

from .kernel_rows import CPU, OwnLayer, ScriptedClock, part, shapes, tiny
from .scripts import FOLDER

checks, command, cpu, cuda, upstream = (part(name) for name in ("checks", "command", "cpu", "cuda", "upstream"))


@pytest.fixture
def green(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(checks, "run_tests", lambda: checks.Outcome(7, 1, ""))


@pytest.mark.usefixtures("green")
def test_on_a_cpu_every_operator_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "kernels.json"
    names = "qwen3-next-80b-a3b,nemotron-h-8b,kimi-linear-48b-a3b"
    argv = ["--models", names, "--tokens", "512", "--repetitions", "1", "--commit", "abc", "--json", str(path)]
    assert command.main(argv) == 0
    document = json.loads(path.read_text())
    assert {each["operator"] for each in document["rows"]} == {*shapes.Family, "short_conv"}
    assert all(each["prefill_tokens_per_s"] > 0 and each["num_heads"] <= 4 for each in document["rows"])
    assert (document["commit"], document["tests"]) == ("abc", {"passed": 7, "skipped": 1})
    assert {"machine", "device", "python", "torch", "triton", "sglang"} <= document.keys()
    assert "commit abc" in capsys.readouterr().out


@pytest.mark.usefixtures("green")
def test_a_device_is_measured_and_the_file_is_written_after_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kernels.json"
    clock = ScriptedClock(7.0)
    clock.l2_bytes = 1  # type: ignore[attr-defined]
    monkeypatch.setattr(command, "CudaClock", lambda _: clock)
    monkeypatch.setattr(command, "copy_bytes_per_s", lambda *_: 1e12)
    monkeypatch.setattr(command, "LAYERS", {"a": tiny(shapes.Family.KDA), "b": tiny(shapes.Family.MAMBA2)})
    monkeypatch.setattr(upstream, "layer_of", OwnLayer)
    monkeypatch.setattr(upstream, "why_absent", lambda _: None)
    written: list[int] = []

    def measured(*args: Any) -> Any:
        written.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        if len(written) == 4:
            raise RuntimeError("launch failed")
        return real(*args)

    real = cuda.measure
    monkeypatch.setattr(cuda, "measure", measured)
    args = SimpleNamespace(models=["a", "b"], tokens=[512], checkpoints=2, repetitions=1, json=path)
    console = command.Console(width=command.WIDTH)
    assert command.on_cuda(args, CPU, {}, console) == 1
    document = json.loads(path.read_text())
    assert written == [0, 1, 2, 3]
    assert document["memory"] == {"copy_bytes_per_s": 1e12, "l2_bytes": 1}
    assert [each["missing"] for each in document["rows"]] == [[], [], [], ["any figure: RuntimeError: launch failed"]]
    assert all(each["bars"]["aligned"] is not None for each in document["rows"][:3])
    out = capsys.readouterr().out
    assert "16 x 512" in out
    assert "not measured: any figure: RuntimeError: launch failed (b 16 x 512)" in out


def test_tests_that_have_just_been_run_are_skipped_and_the_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kernels.json"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(checks, "run_tests", lambda: pytest.fail("run"))
    monkeypatch.setattr(command, "on_cpu", lambda _args, _device, document, _: command.write(path, document) or 0)
    assert command.main(["--skip-tests", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["tests"] is None


def test_no_figure_while_a_test_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(checks, "run_tests", lambda: checks.Outcome(7, 0, "1 red: test_a.py::test_b"))
    monkeypatch.setattr(cpu, "measure", lambda *_: pytest.fail("measured"))
    path = tmp_path / "kernels.json"
    assert command.main(["--json", str(path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "benchmark/kernels: error: no figure while the kernels' tests are red: 1 red: test_a.py::test_b"
    ]
    assert not path.exists()


@pytest.mark.slow
def test_tests_are_run_in_a_process_of_their_own_and_the_red_ones_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_red.py").write_text("def test_no():\n    assert 0, 'a reason'\ndef test_yes():\n    pass\n")
    (tmp_path / "test_interpreter.py").write_text("def test_left_out():\n    assert 0\n")
    outcome = checks.run_tests(tmp_path)
    assert outcome.num_passed == 1
    assert outcome.red.startswith("1 red: ")
    assert outcome.red.endswith("test_red.py::test_no")
    (tmp_path / "test_red.py").write_text("def test_yes():\n    pass\n")
    assert checks.run_tests(tmp_path) == checks.Outcome(1, 0, "")


@pytest.mark.parametrize(
    ("status", "output", "errors", "red"),
    [
        (1, "", "python: No module named pytest", "(status 1): python: No module named pytest"),
        (0, "3 skipped in 0.1s", "", "(status 0): 3 skipped in 0.1s"),
        (5, "no tests ran in 0.1s", "", "(status 5): no tests ran in 0.1s"),
        (-9, "", "", "(status -9): pytest printed nothing"),
        (1, "\n".join(f"FAILED t.py::t{n} - x" for n in range(7)) + "\n7 failed in 1s", "", "t.py::t4 and 2 more"),
        (2, "ERROR t.py - ImportError\n1 error in 1s", "", "1 red: t.py"),
    ],
)
def test_tests_that_did_not_run_are_red(status: int, output: str, errors: str, red: str) -> None:
    assert checks.outcome_of(status, output, errors).red.endswith(red)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--models", "gpt-2"], "models must be of qwen3-next-80b-a3b"),
        (["--tokens", "511"], "511: give 512 or more"),
        (["--tokens", "many"], "--tokens"),
        (["--checkpoints", "0"], "--checkpoints 0: give 1 to 64"),
        (["--checkpoints", "65"], "--checkpoints 65: give 1 to 64"),
        (["--repetitions", "0"], "--repetitions 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.usefixtures("green")
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--json", str(tmp_path)]) == 2
    assert f"{tmp_path} cannot be written" in capsys.readouterr().err


def test_the_interpreters_times_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        command.main([])
    assert "TRITON_INTERPRET=1: unset it" in capsys.readouterr().err


def test_the_folder_is_a_program() -> None:
    run = subprocess.run([sys.executable, FOLDER / "kernels", "--help"], capture_output=True, text=True, check=True)
    assert "--checkpoints N" in run.stdout
