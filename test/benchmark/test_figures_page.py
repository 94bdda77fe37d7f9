"""Pictures, result files and the page of figures, and `python benchmark/figures` as a user meets it."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from .scripts import load

load("figures")

from benchmark_figures.base import Scale
from benchmark_figures.catalog import FIGURES, chosen
from benchmark_figures.command import main
from benchmark_figures.measure import measure
from benchmark_figures.page import PAGE, write_figure, write_page

TINY = Scale(num_sessions=1, num_chats=4, num_seeds=1)
QUICK = "table-1,3b,5"
"""Without replays."""

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="pictures need matplotlib: make figures installs it",
)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    hide = lambda name, *rest: None if name == "matplotlib" else found(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hide)


@needs_matplotlib
def test_every_figure_is_a_small_picture_with_numbers_and_a_place_on_the_page(tmp_path: Path) -> None:
    samples = measure((cell for figure in FIGURES for cell in figure.cells(TINY)), num_processes=2)
    for figure in FIGURES:
        write_figure(tmp_path, figure, TINY, figure.numbers(TINY, samples))
    write_page(tmp_path, FIGURES)
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    for figure in FIGURES:
        picture = (tmp_path / f"{figure.id}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert 2_000 < len(picture) < 60_000
        document = json.loads((tmp_path / f"{figure.id}.json").read_text(encoding="utf-8"))
        assert document["verdict"] in page
        assert f"]({figure.id}.png)" in page
        assert f"]({figure.id}.json)" in page
    assert [line for line in page.splitlines() if line.startswith("## ")] == [f"## {each.title}" for each in FIGURES]


@needs_matplotlib
def test_pictures_repeat_to_the_byte_whatever_the_users_settings(tmp_path: Path) -> None:
    import matplotlib

    figure = chosen("5")[0]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        with matplotlib.rc_context({"font.size": 20.0 if name == "b" else 9.0}):
            write_figure(tmp_path / name, figure, TINY, figure.numbers(TINY, {}))
    assert files(tmp_path / "a") == files(tmp_path / "b")


@needs_matplotlib
def test_the_command_repeats_to_the_byte_and_writes_all_numbers(tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert main(["--out", str(tmp_path / name), "--only", QUICK, "--json", str(tmp_path / name) + "s"]) == 0
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert (tmp_path / "as").read_bytes() == (tmp_path / "bs").read_bytes()
    everything: dict[str, Any] = json.loads((tmp_path / "as").read_text(encoding="utf-8"))
    assert everything["seed"] == 0
    assert list(everything["figures"]) == QUICK.split(",")


@needs_matplotlib
def test_the_page_keeps_figures_that_were_made_before(tmp_path: Path) -> None:
    for only in ("5", "3b"):
        assert main(["--out", str(tmp_path), "--only", only]) == 0
    page = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert page.index("figure 3b") < page.index("figure 5")


def test_a_broken_result_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "5.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"5\.json is not a figure's result file"):
        write_page(tmp_path, FIGURES)


def test_without_matplotlib_one_line_names_the_extra(
    tmp_path: Path, without_matplotlib: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path / "out"), "--only", "5"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "make figures installs it" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--only", "6"], "'6' is no figure: give some of table-1, 3a"),
        (["--only", ""], "'' is no figure"),
        (["--seed", "-1"], "seed must be 0 or more, got -1"),
        (["--json", "nowhere/all.json"], "--json must be in an existing folder, got nowhere/all.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_text("", encoding="utf-8")
    assert main(["--out", str(path), "--only", "5"]) == 2
    assert f"--out {path} is a file: give a folder" in capsys.readouterr().err


def test_less_than_one_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--out", "x", "--jobs", "0"])
    assert refused.value.code == 2
    assert "must be a whole number, 1 or more, got '0'" in capsys.readouterr().err
