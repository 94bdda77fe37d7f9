"""No import goes in a circle between files, those inside functions and those for types alone included."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def sources(folder: str, package: str) -> dict[str, str]:
    """The text of every file of `package` in `folder`, by the name of its module."""
    found = {}
    for path in sorted((ROOT / folder / package).rglob("*.py")):
        parts = path.relative_to(ROOT / folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def arrows(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> the modules among `texts` that it imports, at whatever depth of its text."""
    return {name: set(_imported(name, text, texts)) - {name} for name, text in texts.items()}


def _imported(name: str, text: str, modules: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                if f"{module}.{alias.name}" in modules:
                    yield f"{module}.{alias.name}"
                elif module in modules:
                    yield module


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import one another, the first again at the end; empty where there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as found:
        modules: list[str] = found.args[1]
        return modules
    return []


@pytest.mark.parametrize(
    ("folder", "package"),
    [
        *(("python", package) for package in ("marconi", "marconi_cpu", "marconi_lab", "marconi_ray")),
        # A benchmark leaves folders of results as well.
        *((".", str(each.parent.relative_to(ROOT))) for each in sorted((ROOT / "benchmark").glob("*/__init__.py"))),
    ],
)
def test_no_import_goes_in_a_circle(folder: str, package: str) -> None:
    texts = sources(folder, package)
    assert texts
    assert circle(arrows(texts)) == []


@pytest.mark.parametrize(
    "second",
    [
        "from pack.first import A",
        "import pack.first",
        "from pack import first",
        "from .first import A",
        "from . import first",
        "def f():\n    from pack.first import A",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.first import A",
    ],
)
def test_a_circle_is_found_however_it_is_closed(second: str) -> None:
    texts = {"pack": "", "pack.first": "from pack.third import C", "pack.second": second, "pack.third": "import numpy"}
    assert not circle(arrows(texts))
    texts["pack.third"] = "from pack.second import B"
    assert set(circle(arrows(texts))) == {"pack.first", "pack.second", "pack.third"}
