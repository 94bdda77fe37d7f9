"""`marconi demo` and `marconi tiny-model`."""

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console

from marconi.cli import ended_at_once, require_server_extra
from marconi.replay.command import positive
from marconi.replay.result import STDOUT
from marconi_cpu.demo.options import DemoOptions
from marconi_cpu.demo.server_process import ServerFailed
from marconi_cpu.tiny_model import Family, write

_FAMILIES = tuple(map(str, Family))
_DEMONSTRATED = tuple(str(each) for each in Family if each is not Family.WINDOWS)
"""Those that Marconi serves: it refuses sliding windows."""


def add_demo(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `marconi demo`."""
    demo = commands.add_parser(
        "demo",
        help="compare stock SGLang with this project on the same work",
        description="Serve a hybrid model twice with scarce memory, stock and with Marconi, send both the same "
        "requests, and compare computed tokens and answers. Exit status 1 if any answer differs. "
        "Arguments after `--` are passed to both servers.",
        epilog="example:\n  marconi demo --family mamba2 -- --chunked-prefill-size 256",
    )
    demo.add_argument("--model-path", metavar="DIR_OR_NAME", help="any hybrid model (default: build a small one)")
    demo.add_argument("--family", choices=_DEMONSTRATED, default="gdn", help="family of the small model (default: gdn)")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the comparison there (- is stdout)")
    demo.add_argument(
        "--context-chars",
        type=positive,
        metavar="N",
        help="characters of a long text; other texts and the memory scale with it (default: about 1,000 tokens)",
    )
    demo.add_argument("--max-new-tokens", type=positive, default=32, metavar="N", help="tokens of each answer")
    demo.add_argument(
        "--tp-size", type=positive, default=1, metavar="N", help="ranks that share the model (default: 1)"
    )
    demo.add_argument("server_args", nargs="*", metavar="-- SERVER_ARGS", help="flags for both servers")
    demo.set_defaults(run=_demo)


def add_tiny_model(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add `marconi tiny-model`."""
    tiny = commands.add_parser(
        "tiny-model",
        help="write a small hybrid model with random weights",
        description="Write a Hugging Face checkpoint with random weights and a long memory; same seed, same bytes.",
        epilog="example:\n  marconi tiny-model --family gdn --out tiny",
    )
    tiny.add_argument(
        "--family",
        choices=_FAMILIES,
        required=True,
        help="gdn: Qwen3.5 text; mamba2: Nemotron-H; short-conv: LFM2; windows: Inkling text",
    )
    tiny.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="a new or empty folder, or an earlier model"
    )
    tiny.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    tiny.add_argument("--mtp", action="store_true", help="with a head that predicts one more token, for speculation")
    tiny.set_defaults(run=_tiny_model)


def _demo(args: argparse.Namespace) -> int:
    require_server_extra("demo")
    # SGLang warns at import of kernels that this device will not use.
    warnings.filterwarnings("ignore", module="sglang")
    options = DemoOptions(
        model_path=args.model_path,
        family=Family(args.family),
        json_path=args.json,
        num_context_chars=args.context_chars,
        max_new_tokens=args.max_new_tokens,
        server_args=tuple(
            args.server_args if args.tp_size == 1 else ["--tp-size", str(args.tp_size), *args.server_args]
        ),
    )
    options.require_possible()
    console = Console(stderr=args.json == STDOUT)
    with ended_at_once(), console.status("load SGLang (about 20 s)"):
        from marconi_cpu.demo.run import run
    try:
        return 0 if run(options, console) else 1
    except ServerFailed as error:
        print(f"marconi: error: {error}", file=sys.stderr)
        return 1


def _tiny_model(args: argparse.Namespace) -> int:
    require_server_extra("tiny-model")
    write(Family(args.family), args.out, seed=args.seed, has_mtp=args.mtp)
    print(args.out)
    return 0
