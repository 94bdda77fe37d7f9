"""The `marconi` command. Each subcommand imports what it needs, so that a base install can run what it can."""

import argparse
import importlib.util
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from marconi import __version__
from marconi.engine.tiny_model import Family
from marconi.replay import command as replay_command
from marconi.router import command as router_command

_SERVER_EXTRA = "pip install 'sglang-marconi[server]'"
_INTERRUPTED = 130
_FAMILIES = tuple(str(family) for family in Family)


class UsageError(Exception):
    """What was asked for cannot be done; the message is one line."""


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run `marconi ARGV`; returns its exit status: 2 for bad input, 1 for a failure, 130 for an interrupt."""
    args = _parser().parse_args(argv)
    interrupt_when_terminated()
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        print("marconi: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except (UsageError, ValueError, OSError) as error:
        print(f"marconi: error: {error}", file=sys.stderr)
        return 2
    return status


def interrupt_when_terminated() -> None:
    """Let SIGTERM and SIGHUP, a supervisor's end and a closed terminal, act as Ctrl-C: what was started is stopped."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="marconi", description="Prefix caching for hybrid models on SGLang.")
    parser.add_argument("--version", action="version", version=f"sglang-marconi {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_tiny_model(commands)
    replay_command.add_parsers(commands)
    router_command.add_parser(commands)
    _add_top(commands)
    return parser


def _add_top(commands: "argparse._SubParsersAction[_Parser]") -> None:
    top = commands.add_parser(
        "top",
        help="watch a server's cache",
        description="Show what the cache of a server holds and does, live; Ctrl-C ends.",
    )
    top.add_argument("url", metavar="URL", help="of the server, http://127.0.0.1:30000 for example")
    top.add_argument(
        "--interval-s", type=_seconds, default=1.0, metavar="SECONDS", help="between two looks (default: 1)"
    )
    top.add_argument("--once", action="store_true", help="print one look and end")
    top.add_argument("--api-key", metavar="KEY", help="the server's, if it has one")
    top.set_defaults(run=_top)


def _top(args: argparse.Namespace) -> int:
    from marconi.engine import top

    if args.once:
        return top.show_once(args.url, Console(), args.api_key)
    return top.watch(args.url, args.interval_s, Console(), args.api_key)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _add_demo(commands: "argparse._SubParsersAction[_Parser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="do the same work against stock SGLang and this project, side by side",
        description="Serve a hybrid model twice, stock and with Marconi, do the same work, and compare the answers. "
        "Exit status 1 if any answer differs. What follows `--` goes to both servers.",
    )
    demo.add_argument("--model-path", metavar="DIR_OR_NAME", help="any hybrid model; default: a small one, built")
    demo.add_argument("--family", choices=_FAMILIES, default="gdn", help="of the small model (default: gdn)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the comparison there")
    demo.add_argument("--context-chars", type=_positive, default=4000, metavar="N", help="of the shared context")
    demo.add_argument("--max-new-tokens", type=_positive, default=32, metavar="N", help="of each answer")
    demo.add_argument("server_args", nargs="*", metavar="-- SERVER_ARGS", help="for both servers")
    demo.set_defaults(run=_demo)


def _add_tiny_model(commands: "argparse._SubParsersAction[_Parser]") -> None:
    tiny = commands.add_parser(
        "tiny-model",
        help="write a small hybrid model with random weights",
        description="Write a Hugging Face checkpoint with random weights and a long memory; same seed, same bytes.",
    )
    tiny.add_argument("--family", choices=_FAMILIES, required=True, help="gdn: Qwen3.5 text; mamba2: Nemotron-H")
    tiny.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="a new or empty folder, or an earlier model"
    )
    tiny.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    tiny.set_defaults(run=_tiny_model)


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return number


def _demo(args: argparse.Namespace) -> int:
    _require_server_extra("demo")
    # SGLang warns at import of kernels that this device will not use.
    warnings.filterwarnings("ignore", module="sglang")
    from marconi.engine.demo.options import DemoOptions

    options = DemoOptions(
        model_path=args.model_path,
        family=Family(args.family),
        json_path=args.json,
        num_context_chars=args.context_chars,
        max_new_tokens=args.max_new_tokens,
        server_args=tuple(args.server_args),
    )
    options.require_possible()
    console = Console()
    with console.status("load SGLang"):
        from marconi.engine.demo.run import run
        from marconi.engine.server_process import ServerFailed
    try:
        return 0 if run(options, console) else 1
    except ServerFailed as error:
        print(f"marconi: error: {error}", file=sys.stderr)
        return 1


def _tiny_model(args: argparse.Namespace) -> int:
    _require_server_extra("tiny-model")
    from marconi.engine.tiny_model import write

    write(Family(args.family), args.out, seed=args.seed)
    print(args.out)
    return 0


def _require_server_extra(command: str) -> None:
    if importlib.util.find_spec("sglang") is None:
        raise UsageError(f"`marconi {command}` needs SGLang, which is not installed: {_SERVER_EXTRA}")
