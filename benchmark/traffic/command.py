"""Ordinary shapes of traffic on real servers: the tokens that came from the cache, over those that could have.

    python benchmark/traffic [--shape NAME ...] [--memory plentiful|short|short-with-host|all] [--family NAME]
                             [--server NAME ...] [--small] [--rig] [--times N] [--explain] [--check]
                             [--json FILE] [--plot FILE.svg]
    python benchmark/traffic --read FILE...        the table, the check and the plot of figures written by --json

Stock SGLang with its two strategies and this project's cache with both, one server after the other; all shapes on each,
the cache flushed between them. Above a host tier stock is asked with either write policy. Answers are greedy and of
fixed lengths, texts from fixed seeds, what arrives at once arrives in one message: tokens are the same in every run.
Times are of one run, for information.

With `--rig` there is neither server nor model: four times as many sessions, three times as long, through the real cache
classes, on a simulated scheduler (`rig.py`).

With `--check` exit status 1 where this project's default has less from the cache than the best of stock's, by more than
half a point of the prompt tokens.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from marconi.cli import interrupt_when_terminated
from marconi.replay.command import positive
from marconi.replay.result import require_writable
from marconi_cpu import tiny_model
from marconi_cpu.demo.server_process import ServerFailed, ServerProcess, scratch_folder
from marconi_cpu.demo.stream import WrongAnswer

from .client import ask, counters
from .figures import Count, Counters, Row, behind, causes_of, table_of
from .plot import save
from .program import Scale
from .servers import COMMON_ARGS, POOLS, Memory, Server
from .shapes import BY_NAME, SHAPES

PROGRAM = "benchmark/traffic"
SMALL = Scale(number=0.5, turns=0.5, length=0.5)


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, print and write; exit status 1 for a server that failed or a failed check, 2 for bad input."""
    args = _arguments(argv)
    interrupt_when_terminated()
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        rows = _rows(args, console)
    except (ServerFailed, WrongAnswer, httpx.HTTPError) as error:
        print(f"{PROGRAM}: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    servers = [server for server in Server if any(server in row.counts for row in rows)]
    console.print(table_of(rows, servers, "ordinary traffic"))
    if args.explain:
        console.print(causes_of(rows, servers))
    if args.json is not None:
        on = "rig" if args.rig else f"tiny-{args.family}"
        document = {"on": on, "small": args.small, "rows": [row.to_json() for row in rows]}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        save(args.plot, rows)
    return int(args.check and bool(behind(rows)))


def _rows(args: argparse.Namespace, console: Console) -> list[Row]:
    if args.read is not None:
        rows: list[Row] = args.read
        return rows
    return replay(args, console) if args.rig else measure(args, console)


def measure(args: argparse.Namespace, console: Console) -> list[Row]:
    """A row for each shape and memory; raises what `ServerProcess` and `ask` raise."""
    scale = SMALL if args.small else Scale()
    counts: dict[tuple[str, Memory], dict[Server, Count]] = {}
    with scratch_folder() as scratch:
        model = scratch / f"tiny-{args.family}"
        tiny_model.write(args.family, model)
        for memory in args.memory:
            for server in filter(memory.is_for, args.server):
                log = scratch / f"{server}-{memory}.log"
                server_args = [*COMMON_ARGS, *memory.args(server, args.times), *server.args]
                with ServerProcess(model, server_args, log_path=log) as running:
                    for shape in args.shape:
                        started_s = time.monotonic()
                        before = counters(running.url) if server.is_ours else Counters()
                        with console.status(f"{server}, {memory} memory: {shape}"):
                            asked = ask(running.url, BY_NAME[shape].program(scale))
                        since = counters(running.url).since(before) if server.is_ours else Counters()
                        counts.setdefault((shape, memory), {})[server] = Count.of(asked, since)
                        took = f"{time.monotonic() - started_s:.0f} s"
                        console.print(f"{server}, {memory} memory: {shape} {took}", highlight=False)
    return [Row(shape, memory, counts[shape, memory]) for shape in args.shape for memory in args.memory]


def replay(args: argparse.Namespace, console: Console) -> list[Row]:
    """The same without servers, larger; the small size is that of the servers."""
    import torch

    from . import rig

    logging.disable(logging.WARNING)
    # Operations on indices are small: threads that wait for each other take longer.
    torch.set_num_threads(1)
    scale, pools = (Scale(), POOLS) if args.small else (rig.SCALE, rig.POOLS)
    rows = []
    for shape in args.shape:
        for memory in args.memory:
            with console.status(f"{memory} memory: {shape}"):
                program = BY_NAME[shape].program
                asked = filter(memory.is_for, args.server)
                counts = {
                    server: Count.of(*rig.ask(server, pools[memory].times(args.times), program(scale)))
                    for server in asked
                }
            rows.append(Row(shape, memory, counts))
            console.print(f"{memory} memory: {shape}", highlight=False)
    return rows


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=(__doc__ or "").splitlines()[0])
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shape", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--memory", choices=[*Memory, "all"], default="all", help="default: all")
    parser.add_argument(
        "--family", type=_family, default=tiny_model.Family.GDN, help=f"{', '.join(tiny_model.Family)} (default: gdn)"
    )
    parser.add_argument(
        "--server", nargs="+", choices=[*Server], default=[*Server], metavar="NAME", help=", ".join(Server)
    )
    parser.add_argument("--small", action="store_true", help="half as many, half as long")
    parser.add_argument("--rig", action="store_true", help="without servers, larger")
    parser.add_argument("--times", type=positive, default=1, metavar="N", help="N times the memory (default: 1)")
    parser.add_argument("--explain", action="store_true", help="missed tokens by cause as well")
    parser.add_argument("--check", action="store_true", help="exit status 1 where ours is behind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures there, as SVG")
    parser.add_argument("--read", nargs="+", type=Path, metavar="FILE", help="figures that were written before")
    args: Any = parser.parse_args(argv)
    args.memory = [*Memory] if args.memory == "all" else [Memory(args.memory)]
    args.server = [Server(name) for name in args.server]
    try:
        require_writable(args.json)
        args.read = args.read and [row for path in args.read for row in _read(path)]
    except ValueError as wrong:
        parser.error(str(wrong))
    if args.plot is not None and not args.plot.parent.is_dir():
        parser.error(f"--plot must be in an existing folder, got {args.plot}")
    return args


def _read(path: Path) -> list[Row]:
    try:
        return [Row.from_json(row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    except (OSError, ValueError, LookupError, TypeError) as wrong:
        raise ValueError(f"--read {path}: not figures written by --json ({wrong!r})") from None


def _family(name: str) -> tiny_model.Family:
    try:
        return tiny_model.Family(name)
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None


if __name__ == "__main__":
    sys.exit(main())
