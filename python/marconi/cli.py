"""The `marconi` command. Each subcommand imports what it needs, so that a base install can run what it can.

At its own import it takes the standard library alone: whatever takes time is loaded where an interrupt is met.
"""

import argparse
import difflib
import importlib.util
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from marconi import __version__

_SERVER_EXTRA = "pip install '.[server]' in its checkout"
_INTERRUPTED = 130
_NO_READER = 141
"""A shell's exit status for a filter that SIGPIPE has ended."""
_SHOW_CURSOR = b"\x1b[?25h"


_OPTION: Final = re.compile(r"--[a-z][a-z0-9-]+")
_UNKNOWN_OPTION: Final = re.compile(r"^unrecognized arguments: (?P<word>--[^\s=]+)")
_UNKNOWN_CHOICE: Final = re.compile(r"invalid choice: '(?P<word>[^']*)' \(choose from (?P<known>.*)\)")


class UsageError(Exception):
    """A request that cannot be carried out; the message is one line."""


class _Help(argparse.HelpFormatter):
    """Help that wraps sentences, and keeps the lines of an example."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("example:\n") else super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, with the word that was likely meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(formatter_class=_Help, **settings)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}{self._meant(message)}\n")

    def _meant(self, message: str) -> str:
        """A question after an unknown command, value or option that is close to a known one."""
        known: Sequence[str] = ()
        if unknown := _UNKNOWN_CHOICE.search(message):
            known = [name.strip("'") for name in unknown["known"].split(", ")]
        elif unknown := _UNKNOWN_OPTION.search(message):
            known = _OPTION.findall(self.format_help())
        close = difflib.get_close_matches(unknown["word"], known, 1) if unknown else ()
        return f"; did you mean {close[0]}?" if close else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `marconi ARGV`.

    Returns its exit status: 2 for bad input, 1 for a failure, 130 for an interrupt, 141 where nobody reads on.
    """
    try:
        try:
            interrupt_when_terminated()
            args = parse(argv)
            status: int = args.run(args)
        finally:
            _flush()
    except KeyboardInterrupt:
        print("marconi: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return _NO_READER
    except (UsageError, ValueError, OSError) as error:
        _drop_output()
        print(f"marconi: error: {error}", file=sys.stderr)
        return 2
    except SystemExit as ended:
        # How rich ends a program whose output nobody reads.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        return _NO_READER
    return status


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read a command line, of which no word and `help` ask for help; `marconi check` leaves the rest to SGLang."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] == "help":
        argv = [*argv[1:2], "--help"]
    args, rest = _parser().parse_known_args(argv)
    if args.run is _check:
        args.launch_args = rest
    elif rest:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _flush() -> None:
    # At the interpreter's end a failure would be a traceback, whatever is returned.
    if sys.stdout is not None:
        sys.stdout.flush()


def _drop_output() -> None:
    """Send to nowhere what stdout does not take."""
    try:
        _flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interrupt_when_terminated() -> None:
    """Let SIGTERM and SIGHUP, a supervisor's end and a closed terminal, act as Ctrl-C: what was started is stopped."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Under nohup a hang-up is ignored, and stays so.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


@contextmanager
def ended_at_once() -> Iterator[None]:
    """While large libraries load, an interrupt ends the process on the spot: there is nothing to stop or to clean.

    Raised in the middle of an import it may be lost, or come back as an error or a traceback of the library's own.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] == signal.default_int_handler:
            signal.signal(number, _end_at_once)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_at_once(_number: int, _frame: FrameType | None) -> NoReturn:
    with suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
        os.write(2, b"marconi: interrupted\n")
    os._exit(_INTERRUPTED)


def _parser() -> argparse.ArgumentParser:
    from marconi.extensions import COMMANDS, installed
    from marconi.plan import command as plan_command
    from marconi.replay import command as replay_command
    from marconi.router import command as router_command
    from marconi.validate import command as validate_command
    from marconi.view import command as view_command

    parser = _Parser(prog="marconi", description="Prefix caching for hybrid models on SGLang.")
    parser.add_argument("-V", "--version", action="version", version=f"sglang-marconi {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_check(commands)
    replay_command.add_parsers(commands)
    plan_command.add_parser(commands)
    view_command.add_parser(commands)
    router_command.add_parser(commands)
    _add_top(commands)
    _add_why(commands)
    validate_command.add_parser(commands)
    for add_to in installed(COMMANDS):
        add_to(commands)
    return parser


def _add_top(commands: "argparse._SubParsersAction[_Parser]") -> None:
    top = commands.add_parser(
        "top",
        help="watch a server's cache, or a router's fleet",
        description="Show the contents and activity of a server's cache, or the workers of a router, live; Ctrl-C ends "
        "it.",
        epilog="example:\n  marconi top http://127.0.0.1:30000",
    )
    top.add_argument(
        "url", metavar="URL", help="the address of the server or router, for example http://127.0.0.1:30000"
    )
    top.add_argument(
        "--interval-s", type=_seconds, default=1.0, metavar="SECONDS", help="seconds between two updates (default: 1)"
    )
    top.add_argument("--once", action="store_true", help="print the current values once and exit")
    top.add_argument("--api-key", metavar="KEY", help="the server's API key, or the router's token, if it has one")
    top.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> int:
    from rich.console import Console

    from marconi.view import top

    if args.once:
        return top.show_once(args.url, Console(), args.api_key)
    return top.watch(args.url, args.interval_s, Console(), args.api_key)


def _add_why(commands: "argparse._SubParsersAction[_Parser]") -> None:
    why = commands.add_parser(
        "why",
        help="say why requests of a server missed",
        description="Say why the latest requests of a server missed, or one of them, part by part.",
        epilog="example:\n  marconi why http://127.0.0.1:30000\n  marconi why http://127.0.0.1:30000 5f0c --since 81aa",
    )
    why.add_argument("url", metavar="URL", help="the server's address, for example http://127.0.0.1:30000")
    why.add_argument("request", nargs="?", metavar="REQUEST", help="the id of a request, or its beginning")
    why.add_argument(
        "--since",
        metavar="OTHER",
        help="say what has changed in that chat since another one, by the beginning of its id",
    )
    why.add_argument("--api-key", metavar="KEY", help="the server's administrator key, or its API key, if it has one")
    why.set_defaults(run=_why)


def _why(args: argparse.Namespace) -> int:
    from rich.console import Console

    from marconi.view import why

    if args.since is not None and args.request is None:
        raise ValueError(f"--since {args.since}: REQUEST must be given, the later of the two")
    return why.show(args.url, args.request, Console(), args.api_key, args.since)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def _add_check(commands: "argparse._SubParsersAction[_Parser]") -> None:
    check = commands.add_parser(
        "check",
        help="check whether a command line of SGLang would be served with this cache",
        usage="marconi check [options] [--] LAUNCH_ARGS",
        allow_abbrev=False,
        description="Check, without a device or a server, which flags of a command line --radix-cache-backend "
        "marconi supports, which it refuses and why, and how large the pools would be. LAUNCH_ARGS are flags of "
        "sglang.launch_server: all flags that are not listed below, and all after `--`. Exit status 0 if it would be "
        "served, 1 if not.",
        epilog="example:\n  marconi check --gpu-memory 80GB -- "
        "--model-path Qwen/Qwen3-Next-80B-A3B-Instruct --tp-size 4",
    )
    check.add_argument(
        "--platform",
        choices=("cuda", "cpu"),
        help="platform of the machine that would serve (default: cuda; cpu if SGLANG_PLATFORM is marconi_cpu)",
    )
    check.add_argument(
        "--config",
        type=Path,
        metavar="FILE_OR_DIR",
        help="the model's config.json, or its folder (default: --model-path, if that is a folder, else known models)",
    )
    check.add_argument(
        "--gpu",
        choices=("ampere", "hopper", "blackwell"),
        default="hopper",
        help="generation of its cards, by which SGLang refuses some launches (default: hopper)",
    )
    check.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="memory of one card, such as 80GB: check whether the model fits, and compute its pools",
    )
    check.add_argument(
        "--weights",
        metavar="SIZE",
        help="size of the weights on one card (default: from the configuration and its quantisation)",
    )
    check.add_argument("--json", type=Path, metavar="FILE", help="write the answer there (- is stdout)")
    check.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    require_server_extra("check")
    warnings.filterwarnings("ignore", module="sglang")
    from marconi.check.question import Question
    from marconi.engine.cpu_platform import choose_platform, is_active

    if args.platform is None:
        args.platform = "cpu" if is_active() else "cuda"
    question = Question.read(args)
    if sys.stderr is not None and sys.stderr.isatty():
        print("marconi: loading SGLang, which takes some ten seconds", file=sys.stderr, flush=True)
    with ended_at_once():
        # What SGLang is imported on here, whatever it is asked about.
        choose_platform(os.environ)
        from marconi.check import command
    return command.run(question)


def require_server_extra(command: str) -> None:
    """`UsageError` where SGLang, which `marconi COMMAND` needs, is not installed."""
    if importlib.util.find_spec("sglang") is None:
        raise UsageError(f"`marconi {command}` needs SGLang, which is not installed: {_SERVER_EXTRA}")
