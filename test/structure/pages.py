"""The documentation as code sees it: pages, their blocks, and what a block's sessions and commands print."""

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest.mock import patch

from marconi.cli import main

ROOT = Path(__file__).parents[2]
PAGES = tuple(sorted((*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"))))
TOLERANCE = 0.05
"""By how much a shown number of a replay may differ: rounding of logarithms is the processor's own."""
BARS = " ▁▂▃▄▅▆▇█"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"[(+-]?[0-9][0-9,]*(\.[0-9]+)?(e[+-]?[0-9]+)?[x%),.:;]*")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    kind: str
    """What stands behind the fence: python, pycon, console, ..."""
    text: str
    line: int

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def page(name: str) -> Path:
    return ROOT / name


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        yield Block(path, match[1], match[2], text.count("\n", 0, match.start()) + 1)


def run_python(path: Path, facts: dict[str, Any], *, exactly: bool = True) -> int:
    """Run a page's `python` blocks and hold its `pycon` blocks to what they show; returns how many examples there were.

    `AssertionError` with the place, what was shown and what came.
    """
    num_examples = 0
    checker = None if exactly else _About()
    for block in blocks(path):
        if block.kind == "python":
            exec(compile(block.text, block.place, "exec"), facts)  # noqa: S102 - the page's own code
        elif block.kind == "pycon":
            num_examples += _run_session(block, facts, checker)
    return num_examples


def _run_session(block: Block, facts: dict[str, Any], checker: doctest.OutputChecker | None) -> int:
    session = doctest.DocTestParser().get_doctest(block.text, facts, block.place, str(block.page), block.line)
    session.globs = facts  # what one session defines, the next one knows
    failures: list[str] = []
    results = doctest.DocTestRunner(checker, verbose=False).run(session, out=failures.append, clear_globs=False)
    assert not results.failed, "".join(failures)
    return results.attempted


class _About(doctest.OutputChecker):
    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return difference(want, got) is None


def difference(shown: str, printed: str) -> str | None:
    """Where two texts differ in more than white space, rules of a table and a little in a number or a bar; or None."""
    for want, got in zip_longest(_words(shown), _words(printed), fillvalue="the end"):
        if want != got and not _is_close(want, got):
            return f"{want!r} is shown, {got!r} was printed"
    return None


def _words(text: str) -> list[str]:
    return [word for word in text.split() if word.strip("─")]


def _is_close(want: str, got: str) -> bool:
    if want[0] in BARS and got[0] in BARS:
        levels = ([BARS.index(bar) for bar in word] for word in (want, got))
        return len(want) == len(got) and all(abs(one - other) <= 1 for one, other in zip(*levels, strict=True))
    if not _NUMBER.fullmatch(want) or not _NUMBER.fullmatch(got):
        return False
    one, other = (float(re.sub(r"[^0-9.e]", "", word).rstrip(".")) for word in (want, got))
    return abs(one - other) <= TOLERANCE * max(one, other)


@dataclass(frozen=True)
class Command:
    """A line of a `console` block that begins with `$`, and what it shows below it."""

    text: str
    shown: str


def commands(block: Block) -> Iterator[Command]:
    """The commands of a `console` block; a backslash carries one on."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        text, _, shown = part.replace("\\\n", "").partition("\n")
        yield Command(text, shown)


def sentences(path: Path) -> Iterator[str]:
    """The sentences of a page's paragraphs and lists, with `code` for each name in backticks and without addresses."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if re.match(r" {4}|#|\||<|!\[", block.lstrip("\n")):
            continue
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", " ".join(block.split())))
        parts = re.split(r"(?<=[.?!])[)*\"]*\s+(?=[^a-z]|code)", words)
        yield from (part for part in parts if re.search(r"\w", part))


def shell(path: Path) -> Iterator[str]:
    """The commands of a page's indented blocks and of its fenced ones of bash, whole over their lines.

    What is indented and no command comes, too, as far as a shell could read it: callers choose by the first word.
    """
    text = path.read_text(encoding="utf-8")
    for found in re.finditer(r"(?:^ {4}[^\n]*\n)+|^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        command = ""
        for line in (found[1] or found[0]).splitlines():
            command += line.removeprefix("    ") + "\n"
            if _is_whole(command):
                yield command.strip()
                command = ""


def _is_whole(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return not command.endswith("\\\n") and command.count("{") == command.count("}")


def run_command(text: str, folder: Path) -> str:
    """What a command prints in `folder`: a `marconi` command in this process, another one in a shell.

    Of a `marconi` command that fails it is what it says on stderr, before the exit status, as `echo $?` would say it.
    """
    if not text.startswith("marconi "):
        done = subprocess.run(["bash", "-c", text], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.dict(os.environ),
    ):
        # A reader has chosen none.
        os.environ.pop("SGLANG_PLATFORM", None)
        status = main(shlex.split(text)[1:])
    return out.getvalue() if status == 0 else f"{err.getvalue()}exit status {status}\n"
