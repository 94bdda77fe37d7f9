"""`make cuda-check`: what it runs where there is a card, and what it says where there is none."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cuda_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import cuda_check

    monkeypatch.setattr(cuda_check.sys, "path", [*sys.path])
    return cuda_check


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


@pytest.fixture
def steps(cuda_check: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The exit status of each step that was run; 0 unless a test says otherwise."""
    statuses: dict[str, int] = {}

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        name = "servers" if "pytest" in command else "kernels"
        return SimpleNamespace(returncode=statuses.setdefault(name, 0))

    monkeypatch.setattr(cuda_check.subprocess, "run", run)
    return statuses


@pytest.mark.parametrize(
    ("is_available", "capability", "said"),
    [(False, (9, 0), "needs a CUDA device, none found"), (True, (8, 6), "9.0 or higher, got 8.6")],
)
def test_without_a_hopper_card_it_says_so_in_one_line_and_runs_nothing(
    cuda_check: Any,
    steps: dict[str, int],
    is_available: bool,
    capability: tuple[int, int],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert cuda_check.main() == 77
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("cuda-check: skipped: ")
    assert line.endswith(said)
    assert not steps


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(("red", "status"), [(None, 0), ("kernels", 1), ("servers", 1)])
def test_both_steps_run_and_a_red_one_is_told(
    cuda_check: Any, steps: dict[str, int], red: str | None, status: int
) -> None:
    if red is not None:
        steps[red] = 1
    assert cuda_check.main() == status
    assert set(steps) == {"kernels", "servers"}


@pytest.mark.usefixtures("card")
def test_where_no_server_can_run_the_kernels_do_and_it_is_not_called_green(
    cuda_check: Any, steps: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.5.17")
    assert cuda_check.main() == 77
    assert set(steps) == {"kernels"}
    assert "servers: skipped: a server needs sglang 0.5.23, got 0.5.17" in capsys.readouterr().out


def test_what_it_runs_is_there(cuda_check: Any) -> None:
    assert all((ROOT / step[index]).exists() for step, index in ((cuda_check.KERNELS, 0), (cuda_check.SERVERS, -1)))
