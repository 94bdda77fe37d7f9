"""What the pages of the documentation show is so: links lead somewhere, names exist, examples and commands are run."""

import argparse
import importlib
import inspect
import re
import shlex
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from marconi import cli
from marconi.model import load
from marconi.policy.catalog import SERVED, PolicySpec
from marconi.replay.admission.named import ADMISSIONS, admission_of
from marconi.replay.catalog import known_policies
from marconi.replay.trace import PRESETS, WRITERS, readers

from . import pages
from .pages import PAGES, ROOT, Block, blocks, commands, page, run_command, run_python

EXECUTED = ("docs/tree.md", "docs/policies.md", "docs/traces.md", "docs/fleet-index.md")
"""Pages whose Python is run from top to bottom."""
READ_MOST = (
    "README.md",
    *(f"docs/{name}.md" for name in ("quick-start", "serving", "check", "why-a-miss", "troubleshooting")),
)
MAX_MEAN_WORDS = 20
"""Of the sentences of a page that most people read."""
FIRST_SCREEN = 14
"""Lines of the README that 800 pixels show beside its picture, which takes 460."""


def place(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Where a link into a page can lead: its headings, as GitHub spells them."""
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(path: Path) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = path.parent / target if target else path
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("path", PAGES, ids=place)
def test_every_link_leads_somewhere(path: Path) -> None:
    assert not dead_links(path)


def test_every_page_stands_in_the_index_to_which_the_readme_links() -> None:
    index = page("docs/README.md")
    assert "](docs/README.md)" in page("README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)/]+\.md)\)", index.read_text(encoding="utf-8"))
    assert {path.name for path in ROOT.glob("docs/*.md")} - {index.name} <= set(linked)


def test_the_first_screen_of_the_readme_has_the_benefit_a_picture_and_a_command() -> None:
    screen = "\n".join(page("README.md").read_text(encoding="utf-8").splitlines()[:FIRST_SCREEN])
    for shown in ("it saves prefill: **", "\n![", "\n    make demo"):
        assert shown in screen


@pytest.mark.parametrize("name", READ_MOST)
def test_sentences_are_short(name: str) -> None:
    lengths = sorted((len(each.split()), each) for each in pages.sentences(page(name)))
    mean = sum(length for length, _ in lengths) / len(lengths)
    longest = "\n".join(f"{length:4} {text}" for length, text in lengths[-5:])
    assert mean <= MAX_MEAN_WORDS, f"{mean:.1f} words in the mean of {len(lengths)} sentences; the longest:\n{longest}"


# Names


def first_cells(path: Path, pattern: str) -> list[str]:
    """What `pattern` finds in the first cell of each row of a page's tables."""
    return re.findall(rf"^\| `{pattern}", prose(path), re.MULTILINE)


def test_the_policies_page_lists_every_policy_and_no_other() -> None:
    listed = first_cells(page("docs/policies.md"), r"([a-z0-9+-]+)[:\[`]")
    admissions = set(ADMISSIONS)
    assert [name for name in listed if name not in admissions] == list(in_order(known_policies(), listed))
    assert admissions <= set(listed)


def test_the_policies_page_says_which_a_server_offers() -> None:
    (said,) = re.findall(
        r"A server offers (.*?) \(`--marconi-eviction`\)", page("docs/policies.md").read_text(), re.DOTALL
    )
    assert set(re.findall(r"`([a-z-]+)[^`]*`", said)) == set(SERVED)


def in_order(names: Iterable[str], listed: list[str]) -> list[str]:
    """`names` in the order in which `listed` has them, what it lacks at the end."""
    return sorted(names, key=lambda name: listed.index(name) if name in listed else len(listed))


@pytest.mark.parametrize("path", PAGES, ids=place)
def test_every_policy_that_a_command_names_is_one(path: Path) -> None:
    for words in marconi_commands(path):
        for text in words[words.index("--policy") + 1].split(",") if "--policy" in words else ():
            spec = PolicySpec.parse(text)
            assert spec.name in {*known_policies(), "largest"}, "`largest` is what add-a-policy.md adds"
            if spec.admission is not None:
                admission_of(spec.admission, 1)


def test_the_traces_page_lists_every_format_and_workload() -> None:
    path = page("docs/traces.md")
    assert set(first_cells(path, "([a-z-]+)` [|] (?:JSON|CSV|a JSON)")) == set(readers())
    assert set(first_cells(path, "generate:([a-z-]+)`")) == set(PRESETS)
    assert all(f'"{name}"' in path.read_text() for name in WRITERS)


def is_there(name: str) -> bool:
    """Whether `marconi.NAME`, or NAME of the laboratory, is in the code, fields that only an object has among it."""
    parts = (name if name.startswith("marconi_lab.") else f"marconi.{name}").split(".")
    if parts[1] == "engine":  # by its source: its import is SGLang's
        file = (ROOT / "python").joinpath(*parts[:-1]).with_suffix(".py")
        return file.exists() and re.search(rf"^(?:class|def) {parts[-1]}\b", file.read_text(), re.MULTILINE) is not None
    for size in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for part in parts[size:]:
            if inspect.isclass(found) and not hasattr(found, part):
                return re.search(rf"\bself\.{part}\b", inspect.getsource(found)) is not None
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_every_name_in_the_glossary_is_in_the_code() -> None:
    names = re.findall(r"^\| [^|]+ \| `([\w.]+)` \|", prose(page("docs/glossary.md")), re.MULTILINE)
    assert len(names) > 60
    assert not [name for name in names if not is_there(name)]


def test_a_name_that_is_not_in_the_code_is_found() -> None:
    assert is_there("tree.RadixTree.num_tokens")
    assert is_there("engine.cache.tick.Tick")
    assert not [
        name
        for name in (
            "engine.cache.tick.Tack",
            "engine.tick.Tick",
            "tree.Node.age",
            "tree.Shrub",
            "shrub",
            "model.load.it",
        )
        if is_there(name)
    ]


# Commands


def marconi_commands(path: Path) -> list[list[str]]:
    """The words of every `marconi` command of a page, indented or after a `$`, but usage lines in capitals."""
    text = path.read_text(encoding="utf-8").replace("\\\n", "")
    lines = re.findall(r"^(?: {4}|\$ )(?:\.venv/bin/)?marconi ([^#\n]*)", text, re.MULTILINE)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("path", PAGES, ids=place)
def test_every_command_shown_has_options_that_are_there(path: Path) -> None:
    for words in marconi_commands(path):
        if "--list-policies" not in words:
            cli.parse(words)


def unread_in_text(text: str) -> list[str]:
    """What the `marconi ...` commands inside sentences name that is no subcommand, or no option of theirs."""
    found = []
    for span in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        command = re.match(r"marconi\s+([a-z][a-z-]*)\b(.*)", span, re.DOTALL)
        if command is None:
            continue
        own = OPTIONS.get(command[1])
        given = re.findall(r"(--[a-z][a-z-]*)", re.split(r"\s--\s", command[2])[0])
        found += [span] if own is None else [f"marconi {command[1]} {each}" for each in given if each not in own]
    return found


OPTIONS = {
    name: frozenset(parser._option_string_actions)
    for action in cli._parser()._actions
    if isinstance(action, argparse._SubParsersAction)
    for name, parser in action.choices.items()
}
"""Of each subcommand of `marconi`."""


@pytest.mark.parametrize("path", PAGES, ids=place)
def test_every_command_in_a_sentence_has_options_that_are_there(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert unread_in_text(text) == []


def test_a_command_in_a_sentence_that_is_wrong_is_found() -> None:
    text = "`marconi plot LOG`, `marconi plan LOG --host 1GB` and `marconi check -- --tp-size 2`"
    assert unread_in_text(text) == ["marconi plot LOG", "marconi plan --host"]


def test_an_option_that_is_not_there_is_found(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("    marconi replay generate:wildchat --model x --memory 1GB --polcy lru   # wrong\n")
    (words,) = marconi_commands(path)
    with pytest.raises(SystemExit):
        cli.parse(words)


def test_every_make_target_shown_is_one() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    shown = {
        target
        for path in PAGES
        for line in re.findall(r"(?:^    |`)make ([a-z -]+)", path.read_text(), re.MULTILINE)
        for target in line.split()
    }
    assert shown
    assert shown <= targets


def benchmarks() -> set[str]:
    """The names that `make bench` lists, each with a line about it."""
    listed = subprocess.run(["make", "-s", "bench"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {match[1] for match in re.finditer(r"^  BENCH=(\S+) +\S.*[.]$", listed, re.MULTILINE)}


def test_every_benchmark_shown_is_one_that_make_lists_and_runs() -> None:
    known = benchmarks()
    shown = {name for path in PAGES for name in re.findall(r"BENCH=([\w-]+)", path.read_text())} - {"NAME"}
    assert len(shown) > 15
    assert shown <= known
    for name in known:
        command = ["make", "-n", "--old-file=setup", "bench", f"BENCH={name}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        (file,) = re.findall(r"benchmark/\S+", done.stdout)
        assert (ROOT / file).exists(), name


def unread_by_benchmarks(text: str) -> list[str]:
    """The `ARGS` of benchmarks on a page whose flags are not in the benchmark's source."""
    found = []
    for name, args in re.findall(r"BENCH=([a-z][\w-]*)\s+ARGS=(\"[^\"]*\"|\S+)", text):
        base = ROOT / "benchmark" / name.replace("-", "_")
        files = base.rglob("*.py") if base.is_dir() else [base.with_suffix(".py")]
        source = "".join(file.read_text(encoding="utf-8") for file in files)
        found += [f"{name} {flag}" for flag in re.findall(r"--[a-z-]+", args) if f'"{flag}"' not in source]
    return found


@pytest.mark.parametrize("path", PAGES, ids=place)
def test_a_benchmark_reads_the_flags_that_a_page_gives_it(path: Path) -> None:
    assert unread_by_benchmarks(path.read_text(encoding="utf-8")) == []


def test_a_flag_that_a_benchmark_does_not_read_is_found() -> None:
    assert unread_by_benchmarks('`make bench BENCH=validate ARGS="--tiny --concurrency 8"`') == ["validate --tiny"]


def test_a_benchmark_that_is_none_is_refused() -> None:
    done = subprocess.run(
        ["make", "-n", "--old-file=setup", "bench", "BENCH=rig"], cwd=ROOT, capture_output=True, text=True
    )
    assert "BENCH must be one that `make bench` lists, got rig" in done.stderr


# Examples


@pytest.mark.parametrize("name", EXECUTED)
def test_what_a_page_shows_is_what_its_python_prints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_python(page(name), {}, exactly=name != "docs/policies.md")


def test_a_wrong_number_on_a_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page("docs/tree.md").read_text().replace("held 16 tokens, 4 states: 320", "held 16 tokens, 4 states: 330")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    (tmp_path / "tree.md").write_text(text)
    with pytest.raises(AssertionError, match="held 16 tokens, 4 states: 330"):
        run_python(tmp_path / "tree.md", {})


CONSOLES = [
    block for path in PAGES if path.name != "add-a-policy.md" for block in blocks(path) if block.kind == "console"
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("block", CONSOLES, ids=lambda block: block.place)
def test_a_command_prints_what_the_page_shows(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if block.page.name == "traces.md":  # its commands read what its Python wrote
        run_python(block.page, {})
    hold(block, tmp_path)


def hold(block: Block, folder: Path) -> None:
    for command in commands(block):
        printed = run_command(command.text, folder)
        shown = command.shown
        if shown.startswith("...\n"):  # the end of what it prints
            shown = shown.removeprefix("...\n")
            printed = "\n".join(printed.rstrip().splitlines()[-len(shown.splitlines()) :])
        assert pages.difference(shown, printed) is None, f"{command.text}\n{printed}"


def test_the_readme_shows_what_the_capacity_page_shows() -> None:
    shown = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    lines = [line for line in shown if line.startswith(("Would it help?", "Which flags?"))]
    assert len(lines) == 2
    assert set(lines) <= set(page("docs/capacity.md").read_text().splitlines())


def test_the_readme_has_the_size_of_a_state_and_the_figures_of_a_server() -> None:
    model = load("qwen3-next-80b-a3b")
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    size = f"{model.state_bytes / 1e6:.0f} MB"
    assert (
        f"a state has {size}, as much as the KV of {model.state_bytes / model.kv_bytes_per_token:,.0f} tokens" in text
    )
    picture = (ROOT / "docs" / "figures" / "state.svg").read_text(encoding="utf-8")
    assert f"a state, {size}" in picture
    assert f"KV, {model.kv_bytes_per_token:,} bytes" in picture
    rows = re.findall(
        r"^\| (?:coding|moon).* \| [\d.]+ \| ([\d.]+) \| [\d.]+ \| -?\d+ % \| [\d.]+ \|$",
        page("docs/hit-rate.md").read_text(),
        re.M,
    )
    shares = [float(row) for row in rows]
    assert len(shares) == 16
    status = " ".join(page("docs/status.md").read_text().split())
    stock = re.search(r" documents 12 11496 (\d+) ", status)
    documents = re.search(r"\(\*documents\*, ([\d,]+) to ([\d,]+)\)", status)
    assert stock is not None
    assert documents is not None
    computed = [int(each.replace(",", "")) / int(stock[1]) for each in documents.groups()]
    agents, chats, asked = (
        f"{100 * (1 - max(each)):.0f} to {int(100 * (1 - min(each)))} %" for each in (shares[:8], shares[8:], computed)
    )
    shown = f"**{agents} of the computed prompt tokens for coding agents, {chats} for chats, {asked} for documents.**"
    assert shown in text
    demo = re.search(r"Of [\d,]+ prompt .*?answers\.", status)
    assert demo is not None
    assert demo[0] in text


def test_numbers_that_differ_by_more_than_a_little_and_words_that_differ_are_found() -> None:
    shown = "best  74.76 %  1,085 bytes  ▇▇▁\n──────\n"
    assert pages.difference(shown, "best 75.10 %   1,090 bytes ▇▆▁\n──") is None
    for wrong in ("best 64.76 % 1,085 bytes ▇▇▁", "lru 74.76 % 1,085 bytes ▇▇▁", "best 74.76 % 1,085 bytes ▇▄▁"):
        assert pages.difference(shown, wrong) is not None
    assert pages.difference(shown, shown + "more") is not None
