"""What a router in front of workers costs its requests, side by side with the same requests asked of a worker.

    overhead   to the first byte through `marconi router`, less the same asked of a worker, by turns; workers answer at
               once, so all of it is the router: parsing, chat template, tokens, hashes, a decision, a connection more
    streams    500 at once through the router, each piece checked

    python benchmark/gateway [--model DIR] [--requests N] [--streams N] [--json FILE]

The router is the command itself, with the tokenizer and the chat template of the model (default: the small one, built).
Everything runs on this machine: the router shares its cores with the workers and the clients.
"""

import argparse
import asyncio
import contextlib
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.chat.tokenizer import TextTokenizer
from marconi.process import GuardedServer, ServerFailed, free_ports
from marconi.replay.result import require_writable, write
from marconi_cpu.demo.server_process import scratch_folder

from .load import NUM_WARM, Held, Lost, Shape, alternate, hold

PROGRAM = "benchmark/gateway"
WORKER = Path(__file__).parent / "worker.py"
NUM_WORKERS = 2
STARTS_WITHIN_S = 60.0
WORDS = "the state of a layer stands for all tokens before it and cannot be rolled back "


def shapes(num_requests: int) -> list[Shape]:
    """What is asked."""
    chat = {"messages": [{"role": "system", "content": WORDS}, {"role": "user", "content": "Why is that so?"}]}
    long, longer = ({"text": WORDS * number, "stream": True} for number in (100, 5000))
    return [
        Shape("chat, whole", "/v1/chat/completions", chat, num_requests),
        Shape("chat, stream", "/v1/chat/completions", {**chat, "stream": True}, num_requests),
        Shape("8,000 characters, stream", "/generate", long, max(num_requests // 2, 1)),
        Shape("400,000 characters, stream", "/generate", longer, max(num_requests // 20, 1)),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit status 1 where an answer was lost, 2 for bad input."""
    args = _arguments(argv)
    console = Console()
    try:
        with scratch_folder() as folder:
            figures = measure(args, folder)
    except (Lost, ServerFailed) as failure:
        print(f"{PROGRAM}: {'lost' if isinstance(failure, Lost) else 'error'}: {failure}", file=sys.stderr)
        return 1
    console.print(_table(figures))
    streams = figures["streams"]
    console.print(
        f"{streams['num_streams']} streams, {streams['num_at_once']} at once, none lost: first piece "
        f"{streams['first_piece_p50_ms']:.0f} ms P50, {streams['first_piece_max_ms']:.0f} ms at most; longest gap "
        f"{streams['longest_gap_ms']:.0f} ms where {args.gap_s * 1000:.0f} are meant; router "
        f"{streams['router_cpu']:.0%} of a core"
    )
    if args.json is not None:
        write(args.json, figures)
    return 0


def measure(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """All figures; `Lost` where an answer is not what a worker sent, `ServerFailed` where a program does not start."""
    model = args.model or _tiny_model(scratch / "model")
    with contextlib.ExitStack() as stack:
        workers = [
            _started(stack, scratch / f"worker-{number}.log", lambda port: [str(WORKER), str(port), str(model)])
            for number in range(NUM_WORKERS)
        ]
        for worker in workers:
            worker.wait_until_ready()
        urls = ",".join(worker.url for worker in workers)
        command = ["-m", "marconi", "router", "--workers", urls, "--model", str(model), "--port"]
        router = _started(stack, scratch / "router.log", lambda port: [*command, str(port)])
        router.wait_until_ready()
        rows = [_row(workers[0].url, router, shape) for shape in shapes(args.requests)]
        before_s = _cpu_s(router.pid)
        held = asyncio.run(hold(router.url, shapes(1)[1], args.streams, args.gap_s, args.pieces))
        return _figures(rows, held, _cpu_s(router.pid) - before_s)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: a small one, built")
    for name, default, text in (
        ("--requests", 400, "of a shape"),
        ("--streams", 500, "at once"),
        ("--pieces", 50, "of each stream"),
    ):
        parser.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--gap-s", type=float, default=0.2, metavar="S", help="between two pieces (default: 0.2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    for name in ("requests", "streams", "pieces"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)}: give 1 or more")
    if not 0 <= args.gap_s < math.inf:
        parser.error(f"--gap-s {args.gap_s:g}: give 0 or more seconds")
    try:
        require_writable(args.json)
        if args.model is not None:
            TextTokenizer.load(args.model)
    except ValueError as wrong:
        parser.error(str(wrong))
    return args


def _row(direct: str, router: GuardedServer, shape: Shape) -> dict[str, Any]:
    before_s = _cpu_s(router.pid)
    pairs = asyncio.run(alternate(direct, router.url, shape))
    cpu_s = _cpu_s(router.pid) - before_s
    more = [pair.routed_s - pair.direct_s for pair in pairs]
    return {
        "shape": shape.name,
        "num_requests": len(pairs),
        "direct_p50_ms": 1000 * statistics.median(pair.direct_s for pair in pairs),
        "routed_p50_ms": 1000 * statistics.median(pair.routed_s for pair in pairs),
        "overhead_p50_ms": 1000 * statistics.median(more),
        "overhead_p90_ms": 1000 * _quantile(more, 0.9),
        "router_cpu_ms": 1000 * cpu_s / (len(pairs) + NUM_WARM),
    }


def _figures(rows: list[dict[str, Any]], held: Held, cpu_s: float) -> dict[str, Any]:
    return {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "overhead": rows,
        "streams": {
            "num_streams": held.num_streams,
            "num_at_once": held.num_at_once,
            "seconds": held.seconds,
            "first_piece_p50_ms": 1000 * statistics.median(held.first_piece_s),
            "first_piece_max_ms": 1000 * max(held.first_piece_s),
            "longest_gap_ms": 1000 * held.longest_gap_s,
            "router_cpu": cpu_s / held.seconds,
        },
    }


def _table(figures: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE)
    for name in ("to the first byte, ms", "direct P50", "routed P50", "overhead P50", "P90", "router's CPU"):
        table.add_column(name, justify="left" if name.startswith("to") else "right")
    for row in figures["overhead"]:
        numbers = ("direct_p50_ms", "routed_p50_ms", "overhead_p50_ms", "overhead_p90_ms", "router_cpu_ms")
        table.add_row(row["shape"], *(f"{row[name]:.2f}" for name in numbers))
    return table


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def _tiny_model(folder: Path) -> Path:
    command = [sys.executable, "-m", "marconi", "tiny-model", "--family", "gdn", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command
    return folder


def _started(stack: contextlib.ExitStack, log: Path, command: Callable[[int], Sequence[str]]) -> GuardedServer:
    """What Python runs with the arguments `command` of a free port, until the stack is left."""
    port = free_ports(1)
    program = GuardedServer(command(port), port, log_path=log, ready_timeout_s=STARTS_WITHIN_S)
    stack.callback(program.stop)
    program.start()
    return program


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
