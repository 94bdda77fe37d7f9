"""What a host tier wins, by worth and as stock SGLang has it, on recorded agent traffic.

Each point is a workload, a model and an amount of device memory, a share of what an unbounded cache would hold; the
host has `TIMES` as much. At each

    lru               stock, write-through: two pools on either tier, each with an order of its own
    lru-write-back    stock, write-back
    lru-joint         recency on both tiers, which hold nothing dead
    best              worth on both tiers: this project with its flag alone

stock in two pools on the device at its ratio of 0.9, the others in one, and all in two on the host, at that ratio.
`best` without an end of memory is beside them. What counts is seconds of prefill and loading together, by the model of
the device and its link.

    python benchmark/host_tier.py FOLDER [--half LIST] [--workload LIST] [--max-sessions N] [--jobs N] [--json FILE]
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from hit_rate import FRACTIONS, MODELS, Workload, workloads_in
from marconi.model import PrefillLatency, load
from marconi.model.device import device
from marconi.policy.catalog import PolicySpec
from marconi.replay.grid import run_tasks
from marconi.replay.parallel import num_usable_cores
from marconi.replay.progress import metered
from marconi.replay.task import UNBOUNDED_BYTES, ReplayInputs, Task, unbounded_bytes
from marconi.replay.trace import Half, ReadOptions, read

TIMES: Final = 4
STOCK: Final = ("lru", "lru-write-back")
POLICIES: Final = (*STOCK, "lru-joint", "best")
GOAL: Final = 0.7
GOAL_OF_UNBOUNDED: Final = 0.97


@dataclass(frozen=True, slots=True)
class Point:
    """One workload, model and memory."""

    half: str
    workload: str
    model: str
    fraction: float
    memory_bytes: int
    seconds: dict[str, float]
    """Of prefill and loading, by policy."""
    hit_rate: dict[str, float]
    load_s: dict[str, float]
    unbounded_s: float
    unbounded_hit_rate: float

    @property
    def ratio(self) -> float:
        """Seconds of `best` over those of stock's better policy."""
        return self.seconds["best"] / min(self.seconds[name] for name in STOCK)

    @property
    def of_unbounded(self) -> float:
        """Hits of `best` over those of memory without end."""
        return self.hit_rate["best"] / self.unbounded_hit_rate


def measure(folder: Path, half: Half, workload: Workload, max_sessions: int | None, num_processes: int) -> list[Point]:
    """Every point of a workload."""
    options = ReadOptions(session_rate=workload.session_rate, half=half, max_sessions=max_sessions)
    trace = read(folder / workload.file, options)
    points = []
    for name in MODELS:
        model, on = load(name), device("h100")
        inputs = ReplayInputs(trace, model, on, PrefillLatency(model, on))
        total = unbounded_bytes(inputs)
        memories = [int(fraction * total) for fraction in FRACTIONS]
        tasks = [Task(PolicySpec("best"), UNBOUNDED_BYTES)]
        tasks += [
            Task(PolicySpec(policy), num_bytes, host_bytes=TIMES * num_bytes)
            for num_bytes in memories
            for policy in POLICIES
        ]
        with metered(f"{half} {workload.name} {name}", len(tasks) * len(trace.requests)) as meter:
            unbounded, *runs = run_tasks(inputs, tasks, num_processes, meter.advance)
        for index, fraction in enumerate(FRACTIONS):
            of_point = dict(zip(POLICIES, runs[index * len(POLICIES) :], strict=False))
            points.append(
                Point(
                    half=half.value,
                    workload=workload.name,
                    model=name,
                    fraction=fraction,
                    memory_bytes=memories[index],
                    seconds={policy: run.prefill_s for policy, run in of_point.items()},
                    hit_rate={policy: run.token_hit_rate for policy, run in of_point.items()},
                    load_s={policy: run.load_s for policy, run in of_point.items()},
                    unbounded_s=unbounded.prefill_s,
                    unbounded_hit_rate=unbounded.token_hit_rate,
                )
            )
    return points


def mean_ratio(points: Sequence[Point]) -> float:
    """The geometric mean over the points."""
    return math.exp(math.fsum(math.log(point.ratio) for point in points) / len(points))


def render(points: Sequence[Point]) -> Table:
    """A line a point."""
    title = (
        f"seconds of prefill and loading, {points[0].half} half; best over stock {mean_ratio(points):.2f} in the mean"
    )
    table = Table("workload", "model", "device", box=SIMPLE, title=title)
    for name in (*POLICIES, "unbounded", "best over stock", "hits of unbounded"):
        table.add_column(name, justify="right")
    for point in points:
        cells = [f"{point.seconds[policy]:,.0f}" for policy in POLICIES]
        table.add_row(
            *(point.workload, point.model, f"{point.fraction:g}x", *cells, f"{point.unbounded_s:,.0f}"),
            *(f"{point.ratio:.2f}", f"{100 * point.of_unbounded:.1f} %"),
        )
    return table


def missed(points: Sequence[Point]) -> list[str]:
    """What is asked and does not hold."""
    found = []
    if mean_ratio(points) > GOAL:
        found.append(f"best over stock: {mean_ratio(points):.2f} in the mean, at most {GOAL} is asked")
    for point in points:
        where = f"{point.half} {point.workload} {point.model} {point.fraction:g}x"
        if point.ratio > 1:
            found.append(f"{where}: best over stock {point.ratio:.3f}, at most 1 is asked")
        if point.of_unbounded < GOAL_OF_UNBOUNDED:
            found.append(f"{where}: {100 * point.of_unbounded:.1f} % of the hits without end, at least 97 are asked")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Host tiers side by side.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with the traces")
    parser.add_argument("--half", default="reporting", metavar="LIST", help="default: reporting")
    parser.add_argument("--workload", default="coding-agent", metavar="LIST", help="default: coding-agent")
    parser.add_argument("--max-sessions", type=int, metavar="N", help="read no more")
    parser.add_argument("--jobs", type=int, default=num_usable_cores(), metavar="N", help="default: one a core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every point there")
    args = parser.parse_args(argv)
    try:
        halves = [Half(name) for name in args.half.split(",")]
        chosen = workloads_in(args.folder, args.workload)
        every = [
            [p for each in chosen for p in measure(args.folder, half, each, args.max_sessions, args.jobs)]
            for half in halves
        ]
    except (ValueError, OSError) as error:
        print(f"host_tier.py: error: {error}", file=sys.stderr)
        return 2
    console = Console(width=max(Console().width, 160))
    failures: list[str] = []
    for points in every:
        console.print(render(points))
        failures += missed(points)
    for failure in failures:
        console.print(f"MISSED {failure}")
    if args.json is not None:
        document: dict[str, Any] = {
            "benchmark": "host_tier",
            "points": [{**asdict(point), "ratio": point.ratio} for points in every for point in points],
            "missed": failures,
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
