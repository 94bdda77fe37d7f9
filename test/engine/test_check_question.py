"""`marconi check` refuses wrong words in one line before it imports SGLang, and says that it works while it does."""

import argparse
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")

from sglang.srt import arg_groups

from marconi.check import declared
from marconi.check.line import _parser

SOURCE = Path(arg_groups.__file__).parents[1]
MODEL = ("--model-path", "Qwen/Qwen3-Next-80B-A3B-Instruct")
LOADED = 99
# Ends as soon as anything of what takes seconds is imported.
TRAPPED = f"""
import os, sys
class Trap:
    def find_spec(name, *_):
        if name in ("torch", "sglang.srt"):
            sys.stdout.flush()
            os._exit({LOADED})
sys.meta_path.insert(0, Trap)
from marconi.cli import main
sys.exit(main(["check", *sys.argv[1:]]))
"""


def asked(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TRAPPED, *argv], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--gpu-memory", "0.5x", *MODEL), "--gpu-memory must be a size such as 80GB"),
        (("--gpu-memory", "much", *MODEL), "--gpu-memory: memory must be a number above 0"),
        (("--weights", "20GB", *MODEL), "--gpu-memory must be given with --weights"),
        (("--platform", "cpu", "--gpu-memory", "80GB", *MODEL), "--gpu-memory must be left out with --platform cpu"),
        (("--gpu", "volta", *MODEL), "argument --gpu: invalid choice: 'volta'"),
        (("--json", "/", *MODEL), "--json must be a file, got the folder /"),
        (("--gpu-memry", "80GB", *MODEL), "unrecognized arguments: --gpu-memry 80GB; did you mean --gpu-memory?"),
        ((*MODEL, "--page-sise", "64"), "unrecognized arguments: --page-sise 64; did you mean --page-size?"),
        ((*MODEL, "--tp-size", "two"), "argument --tp-size/--tensor-parallel-size: invalid int value: 'two'"),
        ((*MODEL, "--mem-fraction-static", "most"), "--mem-fraction-static: invalid float value: 'most'"),
        ((*MODEL, "--enable-int8-mamba-checkpoint", "yes"), "unrecognized arguments: yes"),
        ((), "the following arguments are required: --model-path"),
        (("--model-path",), "argument --model-path/--model: expected one argument"),
        (("--model-path", "nobody/nothing"), "--model-path: no configuration of nobody/nothing is known here"),
        (("--config", "nowhere/config.json", *MODEL), "--config: nowhere/config.json cannot be read"),
        ((*MODEL, "--radix-cache-backend", "flexkv"), "--radix-cache-backend must be marconi"),
        ((*MODEL, "--marconi-eviction", "mru"), "--marconi-eviction: must be one of lru, "),
        ((*MODEL, "--marconi-ghost-tokens", "-1"), "--marconi-ghost-tokens: must be a number of tokens"),
        ((*MODEL, "--marconi-events", "5557"), "--marconi-events: "),
        ((*MODEL, "--marconi-alpha", "2"), "--marconi-alpha is gone: use --marconi-eviction marconi:ALPHA"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_a_wrong_word_is_refused_in_one_line_before_sglang_is_imported(argv: tuple[str, ...], says: str) -> None:
    ended = asked(*argv)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert says in line


@pytest.mark.parametrize(
    "argv",
    [
        MODEL,
        (
            "--platform",
            "cuda",
            "--gpu-memory",
            "80GB",
            "--",
            *MODEL,
            "--tensor-parallel-size=4",
            "--lora-paths",
            "a",
            "b",
        ),
        (*MODEL, "--tensor-para", "4", "--marconi-explain", "--marconi-eviction", "marconi:2", "--enable-lmcache"),
        ("--", "--config", "launch.yaml"),
    ],
    ids=" ".join,
)
def test_words_with_nothing_wrong_are_left_to_sglang(argv: tuple[str, ...]) -> None:
    ended = asked(*argv)
    assert (ended.returncode, ended.stderr) == (LOADED, ""), "nor is anything said where nobody watches"


def test_a_terminal_is_told_that_sglang_loads() -> None:
    ours, theirs = pty.openpty()
    try:
        ended = subprocess.run([sys.executable, "-c", TRAPPED, *MODEL], stderr=theirs, timeout=120, check=False)
        assert ended.returncode == LOADED
        assert os.read(ours, 1000).decode().strip() == "marconi: loading SGLang, which takes some ten seconds"
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_flags_that_the_source_declares_are_those_of_sglangs_parser() -> None:
    ours, (theirs, _) = declared.declared_parser(), _parser()
    assert ours is not None
    # Plugins of others, which other tests have loaded, add flags of their own.
    more = theirs._option_string_actions.keys() - ours._option_string_actions.keys()
    source = "".join(path.read_text() for path in (SOURCE / "arg_groups" / "fields").glob("*.py"))
    source += (SOURCE / "server_args.py").read_text()
    assert not [name for name in more if name in source or name.strip("-").replace("-", "_") + ": A[" in source]
    assert ours._option_string_actions.keys() <= theirs._option_string_actions.keys()
    for name, action in ours._option_string_actions.items():
        reads = theirs._option_string_actions[name]
        assert action.option_strings == reads.option_strings
        if action.nargs == "*":
            continue
        assert (action.dest, action.nargs, type(action)) == (reads.dest, reads.nargs, type(reads)), name
        assert action.type == reads.type or reads.type is str, name
    read = [name for name, action in ours._option_string_actions.items() if action.nargs != "*"]
    assert len(read) > len(ours._option_string_actions) / 2


def test_flags_that_are_declared_in_another_way_are_left_to_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(declared.read(MODEL), argparse.Namespace)
    monkeypatch.setattr(declared, "_package", lambda: tmp_path)
    assert declared.read(("--polcy", "3")) is None
