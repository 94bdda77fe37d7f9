"""`make cuda-check`: its plan, how its steps end, and what it says where there is no card."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
SLEEP_S = 60
LATE_S = 5.0
"""Of a step that is to be late: Python starts in this time on a busy machine too."""
SERVER_STEPS = ["gdn-flashinfer", "gdn-triton-drafts", "mamba2-pages-host", "gdn-one-pool", "gdn-one-pool-drafts"]


@pytest.fixture
def cuda_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import cuda_check

    monkeypatch.setattr(cuda_check.sys, "path", [*sys.path])
    return cuda_check


@pytest.fixture
def steps(cuda_check: Any) -> Any:
    return sys.modules["steps"]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def planted(steps: Any, code: str, *arguments: object, limit_s: float = 30.0, needs_server: bool = False) -> Any:
    return steps.Step("planted", ("-c", code, *map(str, arguments)), limit_s, needs_server)


def run(steps: Any, step: Any, folder: Path) -> Any:
    return steps.run(step, folder / "log", cwd=ROOT, environment=dict(os.environ), grace_s=1.0)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def pids_in(path: Path, number: int) -> list[int]:
    """The numbers that processes wrote, once there are as many."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        if path.exists() and len(found := path.read_text().split()) == number:
            return [int(each) for each in found]
        time.sleep(0.02)
    raise AssertionError(f"{number} processes were to begin")


GRANDCHILD = f"""
import os, signal, subprocess, sys, time
path, ignore, stays = sys.argv[1:]
if ignore == "yes": signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep({SLEEP_S})"])
with open(path, "a") as file: file.write(f"{{os.getpid()}} {{child.pid}}")
if stays == "yes": time.sleep({SLEEP_S})
"""


@pytest.mark.slow
def test_at_its_limit_neither_a_step_nor_its_grandchild_lives(steps: Any, tmp_path: Path) -> None:
    step = planted(steps, GRANDCHILD, tmp_path / "pids", "yes", "yes", limit_s=LATE_S)
    done = run(steps, step, tmp_path)
    assert done.outcome is steps.Outcome.LATE
    assert done.seconds < SLEEP_S / 2
    assert not any(is_running(pid) for pid in pids_in(tmp_path / "pids", 2))


def test_what_a_step_left_behind_is_ended_and_the_step_has_its_say(steps: Any, tmp_path: Path) -> None:
    done = run(steps, planted(steps, GRANDCHILD, tmp_path / "pids", "no", "no"), tmp_path)
    assert done.outcome is steps.Outcome.GREEN
    assert not any(is_running(pid) for pid in pids_in(tmp_path / "pids", 2))


@pytest.mark.parametrize(
    ("number", "needs_server", "num_running"),
    [(signal.SIGINT, False, 1), (signal.SIGTERM, True, 2)],
    ids=["one by one", "at once"],
)
def test_an_interrupt_ends_the_steps_that_run(
    needs_server: bool, num_running: int, number: signal.Signals, tmp_path: Path
) -> None:
    check = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(ROOT / "benchmark")!r})
import cuda_check, steps
cuda_check.missing_card = cuda_check.missing_server = lambda: ""
cuda_check.PARTS = {{
    "kernels": [
        steps.Step(name, ("-c", {GRANDCHILD!r}, {str(tmp_path)!r} + "/" + name, "no", "yes"), 50.0, {needs_server})
        for name in ("pids-0", "pids-1")
    ]
}}
sys.exit(cuda_check.main(["--part", "kernels", "--logs", {str(tmp_path)!r}]))
"""
    checking = subprocess.Popen([sys.executable, "-c", check], stdout=subprocess.PIPE, text=True)
    pids = [pid for step in range(num_running) for pid in pids_in(tmp_path / f"pids-{step}", 2)]
    checking.send_signal(number)
    said, _ = checking.communicate(timeout=30)
    assert checking.returncode == 130
    assert said.splitlines()[-1] == "cuda-check: interrupted"
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize(
    ("status", "outcome"), [(0, "GREEN"), (1, "WRONG"), (2, "WRONG"), (3, "WRONG"), (77, "SKIPPED"), (-9, "WRONG")]
)
def test_an_outcome_is_the_word_of_the_steps_own_process(status: int, outcome: str, steps: Any, tmp_path: Path) -> None:
    end = f"sys.exit({status})" if status >= 0 else f"os.kill(os.getpid(), {-status})"
    assert run(steps, planted(steps, f"import os, sys; {end}"), tmp_path).outcome is steps.Outcome[outcome]


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("def test(): pass", "GREEN"),
        ("def test(): assert False", "WRONG"),
        ("import pytest\ndef test(): pytest.skip('no card')", "SKIPPED"),
        ("import pytest\ndef test(): pytest.skip('no card')\ndef test_too(): pass", "GREEN"),
        ("x = 1", "WRONG"),
    ],
    ids=["passed", "failed", "skipped", "one of two", "no test"],
)
def test_a_run_of_pytest_is_green_only_if_a_test_passed(
    test: str, outcome: str, cuda_check: Any, steps: Any, tmp_path: Path
) -> None:
    (tmp_path / "test_planted.py").write_text(test)
    step = steps.Step("planted", (*cuda_check.PYTEST, "-p", "no:xdist", str(tmp_path / "test_planted.py")), 60.0)
    assert run(steps, step, tmp_path).outcome is steps.Outcome[outcome]


@pytest.mark.parametrize(
    ("outcomes", "all_in_all"),
    [
        ("GREEN", "GREEN"),
        ("GREEN SKIPPED", "SKIPPED"),
        ("GREEN SKIPPED LATE", "LATE"),
        ("LATE WRONG SKIPPED GREEN", "WRONG"),
        ("", "SKIPPED"),
    ],
)
def test_wrong_outweighs_late_and_late_what_did_not_run(outcomes: str, all_in_all: str, steps: Any) -> None:
    assert steps.worst([steps.Outcome[each] for each in outcomes.split()]) is steps.Outcome[all_in_all]


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("code", "limit_s", "status", "last"),
    [
        ("print('fine')", 30.0, 0, "green"),
        ("print('here is why'); raise SystemExit(1)", 30.0, 1, "WRONG"),
        pytest.param(
            *("import time; print('here is why', flush=True); time.sleep(60)", LATE_S, 3, "not ended in time"),
            marks=pytest.mark.slow,
        ),
        ("raise SystemExit(77)", 30.0, 77, "skipped"),
    ],
    ids=["green", "wrong", "late", "skipped"],
)
def test_the_exit_status_and_the_last_line_tell_how_it_ended(
    code: str,
    limit_s: float,
    status: int,
    last: str,
    cuda_check: Any,
    steps: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cuda_check, "PARTS", {"kernels": (planted(steps, code, limit_s=limit_s),)})
    assert cuda_check.main(["--part", "kernels", "--logs", str(tmp_path)]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"cuda-check: {last}"
    assert all(each in lines[-2] for each in ("planted", last, f"of {limit_s:4.0f} s", str(tmp_path / "planted.log")))
    assert ("  | here is why" in lines) == (status in (1, 3))


@pytest.mark.parametrize(
    ("is_available", "capability", "said"),
    [(False, (9, 0), "needs a CUDA device, none found"), (True, (8, 6), "9.0 or higher, got 8.6")],
)
def test_without_a_hopper_card_it_says_so_in_one_line_and_runs_nothing(
    cuda_check: Any,
    is_available: bool,
    capability: tuple[int, int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(cuda_check, "run", None)
    assert cuda_check.main([]) == 77
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("cuda-check: skipped: ")
    assert line.endswith(said)


@pytest.fixture
def ran(cuda_check: Any, steps: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the steps that were run, none of which runs anything."""
    names: list[str] = []

    def pretend(step: Any, log: Path, **_: Any) -> Any:
        names.append(step.name)
        log.write_text("said\n")
        return steps.Done(step, steps.Outcome.GREEN, 1.0, log)

    monkeypatch.setattr(cuda_check, "run", pretend)
    return names


@pytest.mark.usefixtures("card")
def test_where_no_server_can_run_the_others_do_and_it_is_not_called_green(
    cuda_check: Any, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.5.17")
    assert cuda_check.main(["--logs", str(tmp_path)]) == 77
    assert ran == ["against-references", "flashinfer-rows", "checkpoints", "host-time"]
    said = capsys.readouterr().out
    assert "gdn-flashinfer: skipped: a server needs sglang 0.5.23, got 0.5.17" in said


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--part", "servers"], SERVER_STEPS),
        (["--part", "speed,kernels"], ["against-references", "flashinfer-rows", "checkpoints", "host-time"]),
        (["--step", "gdn-triton-drafts"], ["gdn-triton-drafts"]),
        (["--part", "servers", "--step", "mamba2-pages-host"], ["mamba2-pages-host"]),
    ],
)
def test_parts_and_steps_are_run_alone(
    arguments: list[str],
    expected: list[str],
    cuda_check: Any,
    ran: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_check, "missing_server", lambda: "")
    assert cuda_check.main([*arguments, "--logs", str(tmp_path)]) == 0
    # Those of servers run at once, in no order.
    assert sorted(ran) == sorted(expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--part", "servers,gpu"], "a part must be one of kernels, servers, speed, got 'gpu'"),
        (["--part", "speed", "--step", "gdn-flashinfer"], "--step must be of --part speed, got gdn-flashinfer"),
        (["--slack", "0"], "--slack must be above 0, got 0"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: list[str], said: str, cuda_check: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cuda_check.main(arguments)
    assert said in capsys.readouterr().err


def test_the_plan_is_listed_without_a_card_and_its_limits_sum_up_to_eight_minutes(
    cuda_check: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_check, "missing_card", None)
    assert cuda_check.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    in_all = float(next(line for line in lines if line.startswith("in all: ")).split()[2])
    assert in_all == sum(map(cuda_check.limit_s, cuda_check.PARTS.values()))
    assert in_all <= cuda_check.BUDGET_S == 480
    for part, of_part in cuda_check.PARTS.items():
        in_sum = max if part == "servers" else sum
        assert f"{part}: {in_sum(step.limit_s for step in of_part):g} s" in lines
        assert all(any(line.startswith(f"  {step.name} ") for line in lines) for step in of_part)


def test_names_of_steps_are_their_own(cuda_check: Any) -> None:
    names = [step.name for part in cuda_check.PARTS.values() for step in part]
    assert len({*names, cuda_check.STOCK.name}) == len(names) + 1


LEAVES_PROMPTS = "import os, pathlib; pathlib.Path(os.environ['MARCONI_RED_ANSWERS'], 'planted.red.json').touch(); "


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("code", "is_asked"),
    [
        (LEAVES_PROMPTS + "raise SystemExit(1)", True),
        ("raise SystemExit(1)", False),
        (LEAVES_PROMPTS, False),
    ],
    ids=["a wrong answer", "wrong without an answer", "green"],
)
def test_stock_is_asked_where_an_answer_was_wrong(
    code: str,
    is_asked: bool,
    cuda_check: Any,
    steps: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "old.red.json").touch()
    monkeypatch.setattr(cuda_check, "missing_server", lambda: "")
    monkeypatch.setattr(cuda_check, "PARTS", {"servers": (planted(steps, code, needs_server=True),)})
    stock = steps.Step("stock", ("-c", "print('stock differs too')"), 30.0, needs_server=True)
    monkeypatch.setattr(cuda_check, "STOCK", stock)
    status = cuda_check.main(["--part", "servers", "--logs", str(tmp_path)])
    assert status == (1 if "SystemExit" in code else 0)
    assert ("  stock differs too" in capsys.readouterr().out.splitlines()) == is_asked
