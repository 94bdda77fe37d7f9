"""The benchmark of the picture at tiny sizes: its trees and its figures' shape; never its times."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from marconi.tree import check_invariants

from .scripts import load


@pytest.fixture(scope="module")
def view() -> ModuleType:
    return load("view")


def test_its_trees_are_sound_and_have_as_many_nodes_as_asked_for(view: ModuleType) -> None:
    tree = view.grown(300)
    check_invariants(tree)
    assert 300 <= tree.num_nodes + len(tree.ghosts) <= 303
    assert tree.ghosts
    assert tree.num_states


@pytest.mark.slow
@pytest.mark.browser
def test_every_size_is_measured_in_the_page_as_well(
    view: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / "view.json"
    assert view.main(["--sizes", "60,30", "--repeats", "1", "--json", str(path)]) == 0
    sizes = json.loads(path.read_text())["sizes"]
    assert [*sizes] == ["30", "60"]
    for figures in sizes.values():
        assert {"first_snapshot_ms", "json_bytes", "first_draw_ms", "refresh_ms", "painted_ms"} <= {*figures}
        assert all(each > 0 for each in figures.values())
    assert "no page" not in capsys.readouterr().err
