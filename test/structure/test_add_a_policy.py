"""`docs/add-a-policy.md` works to the letter: typed into a copy of the project it ends green, and a slip ends red."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT, blocks, difference

PAGE = ROOT / "docs" / "add-a-policy.md"
COPIED = (
    "python",
    "sgl-kernel-ext",
    "test",
    "benchmark",
    "docs",
    "pyproject.toml",
    "requirements.lock",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "Makefile",
    "LICENSE",
    ".gitignore",
)
IMPORT_OF_RULE = "from marconi_lab.eviction.largest import LargestFirst\n"


def edit(path: Path, after: str, text: str) -> None:
    """Put `text` behind the first line of a file that ends what `after` matches."""
    source = path.read_text(encoding="utf-8")
    found = re.search(after, source, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{path.name}: nothing matches {after}"
    path.write_text(source[: found.end()] + text + source[found.end() :], encoding="utf-8")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The project with what the page adds to it."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy(ROOT / name, tmp_path / name)
    rule, entry, order, rules, by_hand = (block.text for block in blocks(PAGE) if block.kind == "python")
    (row,) = (block.text for block in blocks(PAGE) if block.kind == "markdown")
    package, tests = tmp_path / "python" / "marconi_lab", tmp_path / "test"
    (package / "eviction" / "largest.py").write_text(rule, encoding="utf-8")
    edit(package / "catalog.py", r"^from marconi_lab\.[^\n]*\n", IMPORT_OF_RULE)
    edit(package / "catalog.py", r'"et-lru",.*?requires=turn_model,\n +\),\n', f"{entry.rstrip()},\n")
    edit(tmp_path / "docs" / "policies.md", r"^\| `et-lru[^\n]*\n", row)
    edit(tests / "policy" / "brute_order.py", r"\Z", f"\n\n{order}")
    twin = tests / "policy" / "test_eviction_twin.py"
    edit(twin, r"^from marconi_lab\.[^\n]*\n", IMPORT_OF_RULE)
    edit(twin, r"^from \.brute_order import \(\n", "    LargestFirstOrder,\n")
    edit(twin, r"^RULES = \(\n", "".join(f"{line},\n" for line in rules.splitlines()))
    (tests / "baselines" / "test_eviction_largest.py").write_text(by_hand, encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module of Python's in `folder`, on its packages and not on those that are installed."""
    path = os.pathsep.join(str(folder / name) for name in ("python", "sgl-kernel-ext"))
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def green(folder: Path, *arguments: str) -> str:
    done = run(folder, *arguments)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
def test_a_reader_who_types_the_page_ends_green(copy: Path) -> None:
    green(copy, "ruff", "check", "--select", "I", "--fix", "--quiet", ".")
    green(copy, "ruff", "format", "--quiet", ".")
    printed = green(copy, "pytest", "-q", "-m", "not slow", "-k", "largest", "test/policy", "test/baselines")
    assert int(re.findall(r"(\d+) passed", printed)[-1]) > 4
    green(copy, "ruff", "check", ".")
    green(copy, "mypy", "--package", "marconi_lab")
    pages = ("test/structure/test_docs.py", "test/structure/test_text.py", "test/structure/test_words.py")
    green(copy, "pytest", "-q", "-k", "polic or test_text or test_words", *pages)
    (console,) = (block.text for block in blocks(PAGE) if block.kind == "console")
    command, shown = console.split("--policy lru-joint,largest,belady\n")
    arguments = [
        *command.removeprefix("$ marconi ").replace("\\\n", " ").split(),
        "--policy",
        "lru-joint,largest,belady",
    ]
    assert difference(shown, green(copy, "marconi", *arguments)) is None


@pytest.mark.slow
def test_a_definition_that_says_something_else_ends_red(copy: Path) -> None:
    path = copy / "test" / "policy" / "brute_order.py"
    text = path.read_text(encoding="utf-8")
    assert text.count("(num_bytes(node), -node.serial)") == 1
    path.write_text(
        text.replace("(num_bytes(node), -node.serial)", "(-num_bytes(node), -node.serial)"), encoding="utf-8"
    )
    done = run(copy, "pytest", "-q", "-x", "-k", "largest", "test/policy/test_eviction_twin.py")
    assert done.returncode == 1, done.stdout[-2000:]
