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
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from gateway.load import NUM_WARM, Held, Lost, Shape, alternate, hold

HERE = Path(__file__).parent
NUM_WORKERS = 2
WORDS = "the state of a layer stands for all tokens before it and cannot be rolled back "


def shapes(num_requests: int) -> list[Shape]:
    """What is asked."""
    chat = {"messages": [{"role": "system", "content": WORDS}, {"role": "user", "content": "Why is that so?"}]}
    return [
        Shape("chat, whole", "/v1/chat/completions", chat, num_requests),
        Shape("chat, stream", "/v1/chat/completions", {**chat, "stream": True}, num_requests),
        Shape("8,000 characters, stream", "/generate", {"text": WORDS * 100, "stream": True}, num_requests // 2),
        Shape("400,000 characters, stream", "/generate", {"text": WORDS * 5000, "stream": True}, num_requests // 20),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: a small one, built")
    parser.add_argument("--requests", type=int, default=400, metavar="N", help="of a shape (default: 400)")
    parser.add_argument("--streams", type=int, default=500, metavar="N", help="at once (default: 500)")
    parser.add_argument("--pieces", type=int, default=50, metavar="N", help="of each stream (default: 50)")
    parser.add_argument("--gap-s", type=float, default=0.2, metavar="S", help="between two pieces (default: 0.2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="marconi-gateway-") as scratch, contextlib.ExitStack() as stack:
        model = args.model or _tiny_model(Path(scratch) / "model")
        ports = [_free_port() for _ in range(NUM_WORKERS + 1)]
        for port in ports[1:]:
            stack.enter_context(_process([str(HERE / "worker.py"), str(port), str(model)]))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        command = ["-m", "marconi", "router", "--workers", ",".join(urls[1:]), "--model", str(model)]
        for url in urls[1:]:
            _wait_for(url)
        router = stack.enter_context(_process([*command, "--port", str(ports[0])]))
        _wait_for(urls[0])
        try:
            rows = [_row(urls, shape, router.pid) for shape in shapes(args.requests)]
            before_s = _cpu_s(router.pid)
            held = asyncio.run(hold(urls[0], shapes(1)[1], args.streams, args.gap_s, args.pieces))
        except Lost as lost:
            print(f"gateway: lost: {lost}", file=sys.stderr)
            return 1
        figures = _figures(rows, held, _cpu_s(router.pid) - before_s)
    console.print(_table(figures))
    streams = figures["streams"]
    console.print(
        f"{streams['num_streams']} streams, {streams['num_at_once']} at once, none lost: first piece "
        f"{streams['first_piece_p50_ms']:.0f} ms P50, {streams['first_piece_max_ms']:.0f} ms at most; longest gap "
        f"{streams['longest_gap_ms']:.0f} ms where {args.gap_s * 1000:.0f} are meant; router "
        f"{streams['router_cpu']:.0%} of a core"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _row(urls: Sequence[str], shape: Shape, router: int) -> dict[str, Any]:
    before_s = _cpu_s(router)
    pairs = asyncio.run(alternate(urls[1], urls[0], shape))
    cpu_s = _cpu_s(router) - before_s
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


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _process(args: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, *args], stderr=subprocess.DEVNULL)  # noqa: S603 - our own programs
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(url: str, timeout_s: float = 60.0) -> None:
    import urllib.error
    import urllib.request

    give_up_s = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):  # noqa: S310 - a loopback address
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.1)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    raise SystemExit(main())
