"""Pages, help texts and error messages avoid phrases that are not idiomatic, and so do docstrings.

A phrase has a pattern and a plain replacement, which the failure shows.

A file that a docstring, a comment or a ledger names in backticks exists. Write its name from its own folder or a folder
above it (`tick.py`, `cache/tick.py`), from `python/marconi` or from the root of the repository; SGLang's from `srt`, as
`srt/managers/scheduler.py` or `managers/scheduler.py`, or from `sglang`. `{a,b}.py` names two files.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from .pages import PAGES, ROOT
from .test_circles import sources

MESSAGES = tuple(
    ROOT / "python/marconi" / name
    for name in (
        "cli.py",
        "engine/launch/flags.py",
        "engine/guards/request.py",
        "engine/reports/status.py",
        "engine/launch/support.py",
        "router/command.py",
    )
)
"""Modules whose help texts and error messages users read."""


class Phrase(NamedTuple):
    """A phrase that is not idiomatic."""

    pattern: str
    """A regular expression, matched anywhere in a text without regard to case."""
    instead: str
    """What to write."""


PHRASES = {
    "worth least": Phrase(r"\bworth (?:the )?(?:least|most)\b", "the least valuable, the most valuable"),
    "go on from": Phrase(r"\b(?:go|goes|went|gone|going) on from\b", "resume from, continue"),
    "go by": Phrase(r"\b(?:go|goes|went|going) by\b", "use, follow, depend on"),
    "go first": Phrase(r"\b(?:go|goes|went) first\b", "is evicted first, is scheduled first, takes precedence"),
    "go with": Phrase(r"\b(?:go|goes) with\b", "is supported with, belongs to, is evicted with"),
    "told": Phrase(
        r"\b(?:is|are|was|were|be|been|being) told\b", "receive, is broadcast, is published, can be determined"
    ),
    "give up": Phrase(r"\b(?:give|gives|gave|given|giving) up\b", "evict, free, abandon"),
    "asked of": Phrase(r"\basked of\b", "send to, request from, run on"),
    "hang on": Phrase(r"\bhangs? on (?:how|what|when|which|whether|who)\b", "depend on"),
    "can be had": Phrase(r"\b(?:can|could|may|cannot) be had\b", "is available"),
    "could not be had": Phrase(r"\bno \w+ (?:can|could) be had\b", "is not available"),
    "leave what": Phrase(r"\bleaves? what\b", "diverge from"),
    "by turns": Phrase(r"\bby turns\b", "alternately"),
    "what stands": Phrase(r"\bwhat (?:stands|stood)\b", "name the thing"),
    "goes on": Phrase(r"\b(?:goes|went|going) on\b", "continues, is unfinished"),
    "may go": Phrase(r"\b(?:may|about to|has) (?:go|gone)\b(?! (?:up|down|beyond))", "is evictable, was evicted"),
    "going to": Phrase(r"\b(?:is|are|was|were) going to\b", "will"),
    "gone on": Phrase(r"\b(?:is|are|was|were) gone on\b", "is continued, is resumed"),
    "short memory": Phrase(r"\b(?:in|of) (?:short|little) memory\b", "with scarce memory"),
    "made-up": Phrase(r"\bmade[- ]up\b", "synthetic"),
    "not tried": Phrase(r"\b(?:was|were) not tried\b", "is untested"),
    "as it comes": Phrase(r"\bas (?:they|it) came?\b", "unchanged"),
}
OPENERS = {
    "Of": Phrase(r"\AOf (?!all\b)", "name the thing: 'The pools of one rank', not 'Of one rank'"),
    "What": Phrase(r"\AWhat\b", "a noun or a verb: 'The arguments by name', not 'What it is called with'"),
    "Who": Phrase(r"\AWho(?:ever)?\b", "a noun: 'The requests that wait', not 'Who waits'"),
    "As": Phrase(r"\AAs (?!long|soon)", "say what it returns or does: 'The learned time', not 'As learned'"),
    "The node's": Phrase(r"\AThe \w+'s\.", "say what it is beyond its name, or leave it out"),
}
"""Beginnings of docstrings."""
FILE_NAME = re.compile(r"`([\w./{},-]+\.(?:py|toml))(?::[^`]*)?`")
"""A file in backticks, perhaps with a name within it: `managers/schedule_batch.py:Req`."""
FOREIGN = ("flashinfer/", "vllm/")
"""Packages that need not be installed."""


def file_names(path: Path) -> Iterator[str]:
    """The files that a module's docstrings and comments name, or a ledger's text."""
    source = path.read_text(encoding="utf-8")
    if not FILE_NAME.search(source):
        return
    texts = [*strings(source)[0], *re.findall("#.*", source)] if path.suffix == ".py" else [source]
    for name in (name for text in texts for name in FILE_NAME.findall(text)):
        before, _, rest = name.partition("{")
        middle, _, after = rest.partition("}")
        yield from (before + each + after for each in middle.split(","))


def file_exists(name: str, path: Path) -> bool:
    """True if `name`, read in the file `path`, is a file of this project or of the installed SGLang."""
    folders = [each for each in path.parents if each.is_relative_to(ROOT)]
    spec = find_spec("sglang")
    if spec is None or name.startswith(FOREIGN):
        return "/" in name or any((folder / name).is_file() for folder in folders)
    (package,) = map(Path, spec.submodule_search_locations or ())
    folders += [ROOT / "python" / "marconi", package.parent, package, package / "srt"]
    return any((folder / name).is_file() for folder in folders)


def prose(page: str) -> str:
    """A page without code: fenced and indented blocks, and code spans."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    return re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "`code`", text))


def hits(text: str, phrases: dict[str, Phrase]) -> Iterator[str]:
    """The names of the phrases in a text, once for each occurrence."""
    for name, phrase in phrases.items():
        yield from [name] * len(re.findall(phrase.pattern, text, re.IGNORECASE))


def shown(text: str, phrases: dict[str, Phrase]) -> list[str]:
    """A line per occurrence: its surroundings, and what to write instead."""
    return [
        f"...{text[max(0, match.start() - 30) : match.end() + 30]}...: write '{phrase.instead}'"
        for phrase in phrases.values()
        for match in re.finditer(phrase.pattern, text, re.IGNORECASE)
    ]


def strings(source: str) -> tuple[list[str], list[str]]:
    """The docstrings of a module, its attributes' included, and all other literal strings."""
    tree = ast.parse(source)
    statements = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    docstrings, others = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = " ".join(node.value.split())
            (docstrings if id(node) in statements else others).append(text)
    return docstrings, others


def counted(docstrings: list[str]) -> Counter[str]:
    """How often each phrase and opener occurs in docstrings."""
    return Counter(name for text in docstrings for name in hits(text, PHRASES | OPENERS))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_has_no_phrase_that_is_not_idiomatic(path: Path) -> None:
    assert shown(prose(path.read_text(encoding="utf-8")), PHRASES) == []


@pytest.mark.parametrize("path", MESSAGES, ids=lambda path: path.name)
def test_help_texts_and_messages_have_none(path: Path) -> None:
    _, others = strings(path.read_text(encoding="utf-8"))
    assert [line for text in others for line in shown(text, PHRASES)] == []


def test_docstrings_have_none() -> None:
    found = {}
    for path in sorted((ROOT / "python").rglob("*.py")):
        for name, number in counted(strings(path.read_text(encoding="utf-8"))[0]).items():
            found[f"{path.name}: {name}, {number} times"] = (PHRASES | OPENERS)[name].instead
    assert not found, "write instead what stands on the right"


def test_a_file_that_is_named_exists() -> None:
    paths = [*(ROOT / "python").rglob("*.py"), *(ROOT / "python").rglob("*.toml")]
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(paths)
        for name in file_names(path)
        if not file_exists(name, path)
    ]
    assert not found, "write these names as the docstring of this module says"


def test_a_file_that_moved_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""See `tick.py`, `core/{a,b}.py:X.y` and `.py`."""\nx = 1  # as `upstream.toml`\ny = "`z.py`"\n')
    assert list(file_names(path)) == ["tick.py", "core/a.py", "core/b.py", "upstream.toml"]
    cache = ROOT / "python" / "marconi" / "engine" / "cache" / "scheduler.py"
    assert all(file_exists(name, cache) for name in ("tick.py", "cache/tick.py", "engine/cache/tick.py"))
    assert not any(file_exists(name, cache) for name in ("told.py", "support.py"))


def test_planted_phrases_are_found() -> None:
    page = "States that go first\nare told.\n\n    goes by `x`\n\n```\nis told\n```\nSee `what goes by`.\n"
    assert sorted(hits(prose(page), PHRASES)) == ["go first", "told"]
    assert len(shown(prose(page), PHRASES)) == 2
    of, what = '"""Of one rank; what goes by."""', '"""What is worth least."""'
    module = f'def f():\n    {of}\n    x: int = 1\n    {what}\n    return "told"\n'
    docstrings, others = strings(module)
    assert others == ["told"]
    assert counted(docstrings) == {"Of": 1, "go by": 1, "What": 1, "worth least": 1}


def defined_twice(texts: Iterable[str]) -> list[str]:
    """Names of public classes that more than one definition among the modules in `texts` has."""
    nodes = (node for text in texts for node in ast.parse(text).body)
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return [name for name, number in names.items() if number > 1 and not name.startswith("_")]


def test_a_public_class_name_is_defined_once() -> None:
    texts = sources("python", "marconi").values()
    assert texts
    assert defined_twice(texts) == []


def test_a_second_definition_is_found() -> None:
    assert defined_twice(["class Held: ...\nclass _Part: ...", "class _Part: ...", "class Held: ..."]) == ["Held"]
