"""Tokens that a server computes over its memory, stock SGLang's and this project's, each alone and above a host tier.

    stock              SGLang's admission and LRU at its own division of bytes (0.9)
    marconi            this project with its flag alone: one pool
    ..., host tier     above a host tier of `TIMES` its memory, in two pools there at SGLang's division

Amounts are shares of what an unbounded cache holds at the end of the trace. Where both curves meet the one of unlimited
memory, eviction no longer matters.

    python benchmark/memory.py TRACE... [--session-rate R] [--model NAME] [--half tuning|reporting] [--processes N]
                               [--json FILE] [--plot FILE.png]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from figures.canvas import Canvas, require_matplotlib
from marconi.model import DEVICES, PrefillLatency, load
from marconi.policy.catalog import SGLANG_MAMBA_RATIO, PolicySpec
from marconi.replay.grid import run_tasks
from marconi.replay.progress import metered
from marconi.replay.task import UNBOUNDED_BYTES, ReplayInputs, Task, unbounded_bytes
from marconi.replay.trace import Half, ReadOptions, read
from marconi.replay.trace.base import UnusedOption

SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
TIMES = 4
KINDS = ("stock", "marconi", "stock, host tier", "marconi, host tier")
UNLIMITED = "unlimited memory"


@dataclass(frozen=True, slots=True)
class Curve:
    """One trace: recomputed tokens at each amount of memory."""

    trace: str
    model: str
    memories_bytes: tuple[int, ...]
    recomputed_tokens: dict[str, tuple[int, ...]]
    """By kind, in the order of the amounts."""
    least_tokens: int
    """In unlimited memory."""


def tasks_at(num_bytes: int) -> tuple[Task, ...]:
    """A replay for each of `KINDS`."""
    stock, ours, ratio = PolicySpec("lru"), PolicySpec("best"), SGLANG_MAMBA_RATIO
    return (
        Task(stock, num_bytes, ratio),
        Task(ours, num_bytes),
        Task(stock, num_bytes, ratio, TIMES * num_bytes),
        Task(ours, num_bytes, None, TIMES * num_bytes),
    )


def measure(path: str, model: str, half: Half, session_rate: float | None, num_processes: int) -> Curve:
    """The curve of a trace."""
    try:
        trace = read(path, ReadOptions(session_rate=session_rate, half=half))
    except UnusedOption:
        trace = read(path, ReadOptions(half=half))
    profile, device = load(model), DEVICES["h100"]
    inputs = ReplayInputs(trace, profile, device, PrefillLatency(profile, device))
    whole = unbounded_bytes(inputs)
    memories = tuple(int(share * whole) for share in SHARES)
    tasks = [Task(PolicySpec("best"), UNBOUNDED_BYTES), *(task for each in memories for task in tasks_at(each))]
    with metered(trace.name, len(tasks) * len(trace.requests)) as meter:
        runs = run_tasks(inputs, tasks, num_processes, meter.advance)
    least, *counts = (run.num_prompt_tokens - run.num_hit_tokens for run in runs)
    by_kind = {kind: tuple(counts[index :: len(KINDS)]) for index, kind in enumerate(KINDS)}
    return Curve(trace.name, model, memories, by_kind, least)


def render(curves: Sequence[Curve]) -> Table:
    """A line an amount of memory."""
    table = Table("trace", "memory, GB", *KINDS, UNLIMITED, box=SIMPLE, caption="millions of tokens recomputed")
    for curve in curves:
        for index, num_bytes in enumerate(curve.memories_bytes):
            counts = (*(curve.recomputed_tokens[kind][index] for kind in KINDS), curve.least_tokens)
            table.add_row(curve.trace, f"{num_bytes / 1e9:,.1f}", *(f"{count / 1e6:,.1f}" for count in counts))
    return table


def plot(curves: Sequence[Curve], path: Path) -> None:
    """Draw a panel a trace."""
    with Canvas(1, len(curves)) as canvas:
        for curve, panel in zip(curves, canvas.panels, strict=True):
            series = {kind: [count / 1e6 for count in counts] for kind, counts in curve.recomputed_tokens.items()}
            series[UNLIMITED] = [curve.least_tokens / 1e6] * len(curve.memories_bytes)
            panel.name("memory, GB", "million tokens", curve.trace.partition(".")[0])
            panel.lines([num_bytes / 1e9 for num_bytes in curve.memories_bytes], series, "xy", legend=False)
        canvas.share_legend()
        canvas.save(path)


def to_json(curves: Sequence[Curve]) -> dict[str, Any]:
    """Convert to JSON."""
    return {
        "benchmark": "memory",
        "times_host": TIMES,
        "curves": [
            {
                "trace": curve.trace,
                "model": curve.model,
                "memories_bytes": curve.memories_bytes,
                "recomputed_tokens": {**curve.recomputed_tokens, UNLIMITED: curve.least_tokens},
            }
            for curve in curves
        ],
    }


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    made = argparse.ArgumentParser(description="Tokens that a server computes over its memory.")
    made.add_argument("traces", nargs="+", metavar="TRACE")
    made.add_argument("--session-rate", type=float, metavar="R", help="sessions a second, where a trace says none")
    made.add_argument("--model", default="qwen3-next-80b-a3b", metavar="NAME", help="default: qwen3-next-80b-a3b")
    made.add_argument("--half", type=Half, default=Half.REPORTING, choices=list(Half), help="default: reporting")
    made.add_argument("--processes", type=int, default=2, metavar="N", help="default: 2")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    made.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it there, with matplotlib")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print, draw and write; exit status 2 for bad input."""
    args = parser().parse_args(argv)
    try:
        if args.plot is not None:
            require_matplotlib()
        curves = [measure(path, args.model, args.half, args.session_rate, args.processes) for path in args.traces]
        Console(width=140).print(render(curves))
        if args.plot is not None:
            plot(curves, args.plot)
        if args.json is not None:
            args.json.write_text(json.dumps(to_json(curves), indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"memory.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
