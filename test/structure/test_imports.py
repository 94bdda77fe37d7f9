"""Functions import only what a process may do without: an optional extra, or SGLang, torch and the like.

Tests of what needs neither are collected without both.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from structure.test_circles import sources

KERNELS = Path(__file__).parents[2] / "sgl-kernel-ext" / "sgl_kernel_ext"
TESTS = Path(__file__).parents[1]
BASE = {*sys.stdlib_module_names, "numpy", "rich"}
"""What every installation has."""
COMMAND = "marconi.cli"
"""Loads the standard library alone, so that an interrupt is met whatever else loads."""


def imported(body: ast.AST, *, in_functions: bool) -> Iterator[str]:
    """Modules that `body` imports as it loads, or else those that its functions import; none for types alone."""
    for node in ast.iter_child_nodes(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if in_functions:
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Import | ast.ImportFrom):
                        yield from _names(inner)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if not in_functions:
                yield from _names(node)
        else:
            yield from imported(node, in_functions=in_functions)


def _names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def needless(texts: Mapping[str, str]) -> list[str]:
    """`MODULE: IMPORT` for what a function imports and nobody could lack."""
    trees = {name: ast.parse(text) for name, text in texts.items()}
    loaded = {name: set(imported(tree, in_functions=False)) for name, tree in trees.items()}

    lacking: set[str] = set()

    def may_lack(name: str) -> bool:
        module = name if name in loaded else name.rpartition(".")[0]
        return module in lacking if module in loaded else name.split(".")[0] not in BASE

    while more := {module for module, names in loaded.items() if any(map(may_lack, names))} - lacking:
        lacking |= more
    return [
        f"{module}: {name}"
        for module, tree in trees.items()
        for name in imported(tree, in_functions=True)
        if not may_lack(name)
    ]


def test_pure_tests_are_collected_without_torch() -> None:
    program = (
        "import sys, pytest; collected = pytest.main(['-qq', '--collect-only', '-n', '0', sys.argv[1]]);"
        "sys.exit(' '.join({'sglang', 'torch'}.intersection(sys.modules)) or int(collected))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(TESTS / "tree")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_functions_import_only_what_a_process_may_do_without() -> None:
    texts = {
        name: text
        for package in ("marconi", "marconi_cpu", "marconi_lab", "marconi_ray")
        for name, text in sources("python", package).items()
    }
    del texts[COMMAND]
    kernels = {f"sgl_kernel_ext.{path.stem}": path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.py")}
    assert needless({**texts, **kernels}) == []


@pytest.mark.parametrize(
    ("source", "is_needless"),
    [
        ("def f():\n    import json", True),
        ("class A:\n    def f(self):\n        if self:\n            from numpy import zeros", True),
        ("def f():\n    from pack.light import A", True),
        ("def f():\n    from pack import light", True),
        ("def f():\n    from pack.heavy import A", False),
        ("def f():\n    import torch", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.light import A", False),
        ("from pack.light import A", False),
    ],
)
def test_a_needless_import_in_a_function_is_found(source: str, is_needless: bool) -> None:
    texts = {"pack": "", "pack.light": "import numpy", "pack.heavy": "from pack.light import A\nimport torch"}
    assert bool(needless({**texts, "pack.file": source})) == is_needless
