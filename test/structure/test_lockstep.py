"""What decides knows nothing that one rank alone knows: no clock, no chance, no address, no order of a set.

`test/engine/test_ranks.py` holds ranks against each other; here the source is read.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "python" / "marconi"
DECIDING = [
    *sorted((ROOT / "policy").rglob("*.py")),
    *(path for path in sorted((ROOT / "tree").rglob("*.py")) if path.stem != "invariants"),
    # The tick is the first rank's clock, and is sent to the others.
    *(path for path in sorted((ROOT / "engine" / "cache").glob("*.py")) if path.stem != "tick"),
    *sorted((ROOT / "engine" / "joint").glob("*.py")),
    ROOT / "engine" / "http" / "hints.py",
]
OF_ONE_PROCESS = {"datetime", "os", "random", "secrets", "threading", "time", "uuid"}
MEASURED = "time.perf_counter"
"""How long an eviction took, for SGLang's metrics."""
UNORDERED = {"set", "frozenset"}


def found_in(source: str) -> Iterator[str]:
    """What of `source` only one rank knows."""
    tree = ast.parse(source)
    sets = {
        ast.unparse(node.target)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and _is_set(node.annotation)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in OF_ONE_PROCESS:
            yield f"from {node.module}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OF_ONE_PROCESS:
            if ast.unparse(node) != MEASURED:
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("id", "hash"):
            yield ast.unparse(node)
        elif isinstance(node, ast.For | ast.comprehension) and _is_unordered(node.iter, sets):
            yield f"for ... in {ast.unparse(node.iter)}"


def _is_set(annotation: ast.expr) -> bool:
    return ast.unparse(annotation).split("[")[0] in {*UNORDERED, "Set", "AbstractSet"}


def _is_unordered(iterated: ast.expr, sets: set[str]) -> bool:
    if isinstance(iterated, ast.Set | ast.SetComp):
        return True
    if isinstance(iterated, ast.BinOp):
        # Only sets and views of keys have these; what they give is a set.
        return isinstance(iterated.op, ast.Sub | ast.BitAnd | ast.BitXor)
    if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name):
        return iterated.func.id in UNORDERED
    return ast.unparse(iterated) in sets


@pytest.mark.parametrize("path", DECIDING, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_that_decides_reads_what_one_rank_alone_knows(path: Path) -> None:
    assert [*found_in(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "source",
    [
        "import time\nnow_s = time.monotonic()",
        "from random import Random",
        "import os\nseed = os.environ['A']",
        "order = sorted(nodes, key=lambda node: id(node))",
        "first = hash(name)",
        "for node in {1, 2}: pass",
        "for req in known - current: pass",
        "taken = [node for node in set(nodes)]",
        "self.rows: set[int] = set()\nfor row in self.rows: pass",
    ],
)
def test_each_is_found(source: str) -> None:
    assert [*found_in(source)]


def test_what_is_the_same_everywhere_is_not_found() -> None:
    source = "import time\nstart_s = time.perf_counter()\nfor node in dict.fromkeys(nodes): pass\nx = 1 in {1, 2}"
    assert not [*found_in(source)]
