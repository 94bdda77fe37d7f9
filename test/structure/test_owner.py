"""One owner of the tree: `policy/hybrid_cache.py` alone changes it and writes what its nodes say of themselves."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from marconi.tree import Node

FACTS = {
    *("absences", "first_waiting", "held_since_s", "host_copy", "last_hit_s", "last_pass_s"),
    *("leaving", "left_by", "num_hits", "num_locks", "on_trial", "set_aside"),
}
"""What ranks a node, beside what the tree's own methods change."""
PACKAGE = Path(__file__).parents[2] / "python" / "marconi"
RADIX = PACKAGE / "tree" / "radix.py"
OWNER = "policy/hybrid_cache.py"
TREES_OF_THEIR_OWN = {"policy/waiting.py", "replay/task.py", "events/store_log.py"}
"""Prompts that wait, what a trace would hold without a limit, and what a store has: nobody ranks their nodes."""
WRITERS = {"left_by": "policy/forecast/turns.py"}
"""Facts that another file writes for the owner, which notes the nodes that it returns."""
ABSENT = {OWNER, "policy/host_tier.py"}
"""Whoever evicts notes why a state is absent (`Node.absent`)."""
TREES = {"tree", "_tree", "index", "_index"}
"""What a tree is called."""


@cache
def changes() -> set[str]:
    """The public methods of a tree that note a node as changed, themselves or by a method that they call."""
    (tree,) = (
        node
        for node in ast.parse(RADIX.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "RadixTree"
    )
    used = {
        method.name: {node.attr for node in ast.walk(method) if isinstance(node, ast.Attribute)}
        for method in tree.body
        if isinstance(method, ast.FunctionDef) and method.name != "__init__"
    }
    found = {name for name, attributes in used.items() if "_changed" in attributes}
    while more := {name for name, attributes in used.items() if attributes & found} - found:
        found |= more
    return {name for name in found if not name.startswith("_")}


def trespasses(file: str, source: str) -> Iterator[str]:
    """Where `source`, of `file`, changes a tree that is another's, or writes a fact of a node."""
    calls = changes()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            on, called = node.func.value, node.func.attr
            name = on.attr if isinstance(on, ast.Attribute) else on.id if isinstance(on, ast.Name) else ""
            if called in calls and name in TREES and file not in TREES_OF_THEIR_OWN:
                yield f"{file}:{node.lineno} calls {name}.{called}"
            if called == "absent" and file not in ABSENT:
                yield f"{file}:{node.lineno} calls absent"
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in FACTS:
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if not of_self and WRITERS.get(node.attr) != file:
                yield f"{file}:{node.lineno} writes {node.attr}"


def test_the_methods_that_change_a_tree_are_known() -> None:
    assert changes() == {"insert", "outline", "lock", "unlock", "evict", "tidy", "take_changed"}


def test_nobody_else_changes_the_tree() -> None:
    files = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}
    files |= {
        str(path.relative_to(PACKAGE.parent)): path for path in sorted((PACKAGE.parent / "marconi_lab").rglob("*.py"))
    }
    others = {file: path for file, path in files.items() if file != OWNER and not file.startswith("tree/")}
    assert OWNER in files
    assert set(Node.__slots__) >= FACTS
    assert TREES_OF_THEIR_OWN | set(WRITERS.values()) <= set(others)
    found = [each for file, path in others.items() for each in trespasses(file, path.read_text(encoding="utf-8"))]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "hybrid.tree.lock(node)",
        "tree.insert(path, [1])",
        "self._tree.evict(node)",
        "node.leaving = 3",
        "node.absences = None",
        "node.absent(absence)",
        "a.num_hits += 1",
    ],
)
def test_a_trespass_is_seen(source: str) -> None:
    path = "engine/cache/radix_cache.py"
    assert [*trespasses(path, source)]
    assert not [*trespasses(path, "hybrid.lock(node); match = tree.match(path); self.key = node.depth")]
