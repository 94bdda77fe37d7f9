"""Lines of the log and of errors that a page shows are in the code, and every refusal of a server is on a page.

On a page `...` stands for values. A shown line is in the code if its pieces are in one string of it, in this order.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from .pages import ROOT, page

PACKAGE: Final = ROOT / "python" / "marconi"
SHOWN: Final = ("docs/quick-start.md", "docs/operations.md", "docs/troubleshooting.md")
REFUSING: Final = ("engine/launch/flags.py", "engine/launch/support.py")
"""Modules whose errors keep a server from being started."""
NOT_REFUSALS: Final = frozenset({"notes", "given_in"})
OTHERWISE: Final = r"^(?:GET|marconi top|sum) |, page (?:1|\.\.\.), "
"""What is no message, and the description of a cache, which is made of several: `engine/test_examples.py` has it."""
VALUE: Final = "\0"
MIN_CHARACTERS: Final = 16
"""A shorter string of the code says nothing by itself."""
OTHER_FORM: Final = re.compile(
    r"\b(?:is|has|holds) \{[^\n]*\}(?:, (?:expected|must be) |; |: give )|: expected (?!\{)|\bunknown [a-z_]+ \{"
    r"|is not known, must|\} is (?:not an? |an? [a-z ]+: )|\} tokens is too |\bnames an? [a-z]+ twice"
    r"|cannot be negative"
)
"""An error in another form than "must be X, got Y"."""


def text_of(node: ast.AST) -> str:
    """A string of the code, its values each as `VALUE`; empty for what is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(each.value if isinstance(each, ast.Constant) else VALUE for each in node.values)
    return ""


def strings() -> set[str]:
    """All strings of the package."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.parent.rglob("*.py")]
    return {text for tree in trees for node in ast.walk(tree) if (text := text_of(node))}


def refusals(path: Path) -> Iterator[str]:
    """The messages that a module raises or yields, and those of its table."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = [
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and function.name not in NOT_REFUSALS
        for node in ast.walk(function)
    ]
    for node in said:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield from _long_enough(text_of(node.exc.args[0]))
        elif isinstance(node, ast.Yield) and node.value is not None:
            yield from _long_enough(text_of(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refused":
            line = node.args[1]
            text = text_of(line.left if isinstance(line, ast.BinOp) else line)
            yield from _long_enough(re.sub(r"{[^}]*}", VALUE, text))


def _long_enough(message: str) -> Iterator[str]:
    if len(message.replace(VALUE, "")) >= MIN_CHARACTERS:
        yield message


def has(text: str, shown: str) -> bool:
    """True if `text` has the pieces of `shown` in order; who says it (`marconi:`, a flag, a URL) stands before."""
    for start in (shown, shown.removeprefix("marconi: ").removeprefix("error: "), re.sub(r"\A\.\.\.:? ", "", shown)):
        at = 0
        for piece in filter(None, (each.strip() for each in start.split("..."))):
            found = text.find(piece, at)
            if found < 0:
                break
            at = found + len(piece)
        else:
            return True
    return False


def lines(name: str) -> list[str]:
    """The lines that a page shows: those of this project's log, and all in the first column of its tables."""
    text = page(name).read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    logged = re.findall(r"^ {4}(marconi: (?!error: ).*)$", text, re.MULTILINE)
    return [line for line in [*spans, *logged] if " " in line and len(line) >= MIN_CHARACTERS]


@pytest.fixture(scope="module")
def code() -> set[str]:
    return strings()


@pytest.mark.parametrize("name", SHOWN)
def test_a_line_that_a_page_shows_is_in_the_code(name: str, code: set[str]) -> None:
    shown = [line for line in lines(name) if not re.search(OTHERWISE, line)]
    assert len(shown) > 2
    assert not [line for line in shown if not any(has(text, line) for text in code)]


@pytest.mark.parametrize("module", REFUSING)
def test_every_refusal_is_on_the_troubleshooting_page(module: str) -> None:
    shown = lines("docs/troubleshooting.md")
    messages = list(refusals(PACKAGE / module))
    assert len(messages) > 4
    assert not [message for message in messages if not any(has(message, line) for line in shown)]


def test_a_line_that_is_not_in_the_code_is_found(code: set[str]) -> None:
    wrong = "marconi: ... states of a prefill were lost and are not kept"
    assert not any(has(text, wrong) for text in code)
    assert has("--x \0 is not supported: \0", "... is not supported: ...")
    assert not has("\0 is not supported", "... must be supported ...")


def test_an_error_says_what_must_be_and_then_what_it_got() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sorted((ROOT / "python").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if OTHER_FORM.search(line)
    ]
    assert not found


def test_an_error_in_another_form_is_found() -> None:
    assert OTHER_FORM.search('raise ValueError(f"{name} is {value!r}, expected a list")')
    assert OTHER_FORM.search('raise ValueError(f"unknown rule {name!r}: one of {known}")')
    assert OTHER_FORM.search('raise ValueError(f"{place}: missing column {name}: expected a, b")')
    assert OTHER_FORM.search('raise ValueError(f"size is {size}; it has at least 1")')
    assert OTHER_FORM.search('raise ValueError(f"size is {size}: give at least 1")')
    assert OTHER_FORM.search('raise ValueError(f"{text!r} is not a whole number, 1 or more")')
    assert OTHER_FORM.search('raise ValueError(f"{path} is a folder: give a file")')
    assert not OTHER_FORM.search('print(f"the memory is {size}: {share} of a card")')
    assert not OTHER_FORM.search('raise ValueError(f"{name} must be a list, got {value!r}")')
