"""The `marconi` command as a shell meets it: a reader that goes away, a full disk, Ctrl-C while libraries load."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from marconi import cli

MARCONI = (sys.executable, "-m", "marconi")
DRAWN = ("generate:chat-short", "--max-sessions", "2", "--model", "nemotron-h-8b", "--memory", "1GB")
# Sends itself Ctrl-C when it comes to a module, and loses the interrupt as some libraries do.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
module, way, *argv = sys.argv[1:]
class Interrupting:
    def find_spec(name, *_):
        if name == module:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                if way == "raised":
                    raise
sys.meta_path.insert(0, Interrupting)
from marconi.cli import main
sys.exit(main(argv))
"""


@pytest.fixture
def unread() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command with nobody at the other end of its output."""

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            return subprocess.run(
                [*MARCONI, *argv],
                # Unbuffered, argparse would meet the failure, and leave it at that.
                env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
                stdout=writer,
                stderr=subprocess.PIPE,
                text=True,
                timeout=120,
                check=False,
            )
        finally:
            os.close(writer)

    return run


@pytest.mark.parametrize(
    "argv",
    [
        ("--help",),
        ("replay", "--list-policies"),
        ("replay", *DRAWN, "--policy", "lru"),
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_a_command_whose_output_nobody_reads_ends_quietly_as_filters_do(
    argv: tuple[str, ...], unread: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    ended = unread(*argv)
    # What a replay has done is printed all the same, if it was printed before.
    assert [line for line in ended.stderr.splitlines() if "replayed in" not in line] == []
    assert ended.returncode == 141


def test_output_that_cannot_be_written_is_one_line_and_status_2() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*MARCONI, "replay", "--list-policies"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert (ended.returncode, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert ended.stderr.startswith("marconi: error: ")


@pytest.mark.parametrize(
    ("module", "way", "argv"),
    [
        ("marconi_cpu.tiny_model", "raised", ("--help",)),
        ("numpy", "raised", ("replay", *DRAWN)),
        pytest.param("sglang.srt", "raised", ("demo",), marks=pytest.mark.slow),
        ("torch", "lost", ("demo",)),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_ctrl_c_while_libraries_load_is_one_line(module: str, way: str, argv: tuple[str, ...]) -> None:
    if argv[0] == "demo":
        pytest.importorskip("sglang")
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, way, *argv],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (130, "marconi: interrupted\n")


@pytest.mark.parametrize(
    ("argv", "start"),
    [((), "usage: marconi [-h]"), (("help",), "usage: marconi [-h]"), (("help", "plan"), "usage: marconi plan")],
)
def test_whoever_asks_for_nothing_or_for_help_gets_help(
    argv: tuple[str, ...], start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(start)


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (each for each in cli._parser()._actions if isinstance(each, argparse._SubParsersAction))
    return dict(commands.choices)


@pytest.mark.parametrize(("name", "parser"), subcommands().items(), ids=subcommands())
def test_the_help_of_a_command_ends_with_examples_that_it_reads(name: str, parser: argparse.ArgumentParser) -> None:
    _, _, examples = parser.format_help().partition("\nexample:\n")
    lines = examples.splitlines()
    assert 1 <= len(lines) <= 2
    for line in lines:
        assert re.match(rf"  marconi {name} ", line)
        args = cli.parse(shlex.split(line)[1:])
        assert args.parser.prog == f"marconi {name}"


@pytest.mark.parametrize(
    ("argv", "end"),
    [
        (("chek",), "did you mean check?"),
        (("replay", *DRAWN, "--mode", "serail"), "did you mean serial?"),
        (("replay", *DRAWN, "--max-sesions", "2"), ": --max-sesions 2; did you mean --max-sessions?"),
        (("replay", *DRAWN, "--zzz"), "unrecognized arguments: --zzz"),
    ],
)
def test_an_unknown_word_is_answered_in_one_line_by_the_closest_one(
    argv: tuple[str, ...], end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(end)
