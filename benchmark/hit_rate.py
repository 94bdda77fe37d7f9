"""Token hit rates side by side: `best` and `marconi` against every peer, and how much of the gap to the bound closes.

Workloads: the coding-agent trace with sessions starting at 0.005 and 0.02 a second (shared system prompts identified),
and both Mooncake traces; profiles Qwen3-Next-80B-A3B and Nemotron-H-8B; memory at 0.02, 0.05, 0.1 and 0.2 of what an
unbounded cache holds at the end. Half of each trace was for tuning, the other half is for the report; both are shown.

    python benchmark/hit_rate.py FOLDER_OF_TRACES [--half tuning,reporting] [--jobs N] [--json FILE]
    python benchmark/hit_rate.py --generated [--jobs N] [--json FILE]   `marconi` and `best` beside `lru-joint`
    python benchmark/hit_rate.py --page docs/hit-rate.md FILE...        the page's tables, from files written by --json

With `--generated` the workloads are the presets of `marconi.replay.trace` and chats of tool calls under one policy
text, 200 sessions of each, with two seeds and memory up to half of the unbounded cache: no folder is needed.

What is asked of each point, a difference of `TIE` being none:

    best recomputes no more than any peer; marconi no more than lru-joint; nothing hits more than the bound
    best closes, in the mean over all points with a gap, a third of that between lru-joint and the bound of its memory

The bound (`marconi.replay.most_hit`) is of one pool with the same bytes, which no division exceeds. Exit
status 1 if any of it fails, 2 for bad input.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.model import PrefillLatency, load
from marconi.model.device import device
from marconi.policy.catalog import parse_list
from marconi.policy.request import Trace
from marconi.replay.bound import bounded
from marconi.replay.grid import num_replays, run_tasks
from marconi.replay.parallel import num_usable_cores
from marconi.replay.progress import metered
from marconi.replay.result import PolicyResult
from marconi.replay.task import ReplayInputs, Task, unbounded_bytes
from marconi.replay.trace import PRESETS, Demand, Half, ReadOptions, generate, preset, read
from marconi.replay.trace.workload import Skewed, SystemPrompts

MODELS = ("qwen3-next-80b-a3b", "nemotron-h-8b")
FRACTIONS = (0.02, 0.05, 0.1, 0.2)
PEERS = ("lru", "lru@judicious", "lru-joint", "seglen", "coverage", "marconi")
POLICIES = (*PEERS, "best")
BOUND = "bound"
COLUMNS = (*POLICIES, BOUND)
TIE = 0.002
GOAL = 1 / 3


@dataclass(frozen=True, slots=True)
class Workload:
    """A file of the folder, and the rate of its sessions where their times are relative."""

    file: str
    session_rate: float | None = None

    @property
    def name(self) -> str:
        """For the table."""
        stem = self.file.split(".")[0]
        return stem if self.session_rate is None else f"{stem} {self.session_rate:g}/s"

    def read(self, folder: Path, half: Half) -> Trace:
        """The trace of one half."""
        return read(folder / self.file, ReadOptions(session_rate=self.session_rate, half=half))


WORKLOADS = (
    Workload("coding-agent.tar.xz", 0.005),
    Workload("coding-agent.tar.xz", 0.02),
    Workload("mooncake-conversation.jsonl.gz"),
    Workload("mooncake-synthetic.jsonl.gz"),
)

GENERATED_POLICIES = ("lru-joint", "marconi", "best")
GENERATED_FRACTIONS = (*FRACTIONS, 0.5)
NUM_SESSIONS = 200
SEEDS = (0, 1)
GENERATED = (
    *PRESETS.values(),
    replace(
        preset("agent-append"),
        name="tool-chat",
        first_prompt=Skewed(mean=60, sigma=0.9, minimum=5, maximum=1_000),
        next_prompt=Skewed(mean=250, sigma=1.2, minimum=5, maximum=4_000),
        system_prompts=SystemPrompts(num_prompts=1, num_tokens=4_000),
    ),
)
"""The last: short observations under one long text."""


@dataclass(frozen=True, slots=True)
class Point:
    """One workload, model and memory: the token hit rate of each policy."""

    half: str
    workload: str
    model: str
    fraction: float
    memory_bytes: int
    hit_rate: dict[str, float]
    """By policy, and of the bound."""

    @property
    def gap(self) -> float:
        """From lru-joint to the bound, as a hit rate."""
        return self.hit_rate[BOUND] - self.hit_rate["lru-joint"]

    @property
    def gain(self) -> float:
        """From lru-joint to best."""
        return self.hit_rate["best"] - self.hit_rate["lru-joint"]

    @property
    def gap_closed(self) -> float | None:
        """The gain as a share of the gap; None where the gap is a tie."""
        return self.gain / self.gap if self.gap > TIE else None

    @property
    def failures(self) -> tuple[str, ...]:
        """What is asked and does not hold."""
        best, marconi = self.hit_rate["best"], self.hit_rate["marconi"]
        lost = [f"best < {peer}" for peer in PEERS if best < self.hit_rate.get(peer, 0.0) - TIE]
        if marconi < self.hit_rate["lru-joint"] - TIE:
            lost.append("marconi < lru-joint")
        lost += [f"{policy} > bound" for policy, rate in self.hit_rate.items() if rate > self.hit_rate[BOUND]]
        return tuple(lost)

    def rate_of(self, policy: str) -> str:
        """In %; a dash for a policy that was left out."""
        return f"{100 * self.hit_rate[policy]:.2f}" if policy in self.hit_rate else "-"

    def to_json(self) -> dict[str, Any]:
        """As the result file holds it."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "gap_closed": self.gap_closed, "failures": list(self.failures)}


def measure(folder: Path, half: Half, workload: Workload, num_processes: int) -> list[Point]:
    """Every point of a workload."""
    grid = Grid(half.value, workload.name, FRACTIONS, POLICIES)
    return grid.points(workload.read(folder, half), num_processes)


def measure_generated(num_processes: int, num_sessions: int = NUM_SESSIONS) -> list[Point]:
    """Every point of every generated workload."""
    points = []
    for seed in SEEDS:
        demand = Demand(num_sessions=num_sessions, session_rate=1.0, seed=seed)
        for workload in GENERATED:
            grid = Grid(f"generated, seed {seed}", workload.name, GENERATED_FRACTIONS, GENERATED_POLICIES)
            points += grid.points(generate(workload, demand), num_processes)
    return points


@dataclass(frozen=True, slots=True)
class Grid:
    """Which points of a trace are measured, and what they are called."""

    half: str
    workload: str
    fractions: Sequence[float]
    policies: Sequence[str]

    def points(self, trace: Trace, num_processes: int) -> list[Point]:
        """Those of every model."""
        return [point for name in MODELS for point in self._of_model(trace, num_processes, name)]

    def _of_model(self, trace: Trace, num_processes: int, name: str) -> list[Point]:
        policies = self.policies
        model, on = load(name), device("h100")
        inputs = ReplayInputs(trace, model, on, PrefillLatency(model, on))
        total = unbounded_bytes(inputs)
        memories = [int(fraction * total) for fraction in self.fractions]
        grid = [Task(policy, num_bytes) for num_bytes in memories for policy in parse_list(",".join(policies))]
        title = f"{self.half} {self.workload} {name}"
        with metered(title, num_replays(grid) * len(trace.requests)) as meter:
            runs = run_tasks(inputs, grid, num_processes, meter.advance)
        by_memory = [
            dict(zip(policies, runs[index * len(policies) :], strict=False)) for index in range(len(self.fractions))
        ]
        best = bounded(inputs, [of_memory["best"] for of_memory in by_memory], num_processes)
        return [
            self._point(name, fraction, of_memory | {"best": each})
            for fraction, of_memory, each in zip(self.fractions, by_memory, best, strict=True)
        ]

    def _point(self, model: str, fraction: float, runs: Mapping[str, PolicyResult]) -> Point:
        """The point that `runs`, by policy, make."""
        best = runs["best"]
        assert best.task.mamba_ratio is None, "a bound of one pool is one of every division"
        bound = best.bound_token_hit_rate
        assert bound is not None
        return Point(
            half=self.half,
            workload=self.workload,
            model=model,
            fraction=fraction,
            memory_bytes=best.task.memory_bytes,
            hit_rate={policy: run.token_hit_rate for policy, run in runs.items()} | {BOUND: bound},
        )


def mean_gap_closed(points: Sequence[Point]) -> float:
    """Over the points that have a gap."""
    shares = [share for point in points if (share := point.gap_closed) is not None]
    return sum(shares) / len(shares) if shares else 1.0


def pooled_gap_closed(points: Sequence[Point]) -> float:
    """All gains over all gaps: wide gaps count for more."""
    return sum(point.gain for point in points) / sum(point.gap for point in points)


def _share(point: Point) -> str:
    return "no gap" if point.gap_closed is None else f"{100 * point.gap_closed:.0f} %"


def render(points: Sequence[Point]) -> Table:
    """A line a point."""
    half = points[0].half
    title = f"token hit rate in %, {half} half; gap closed {100 * mean_gap_closed(points):.0f} %"
    table = Table("workload", "model", "memory", box=SIMPLE, title=title)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("gap closed", justify="right")
    table.add_column("fails")
    for point in points:
        rates = map(point.rate_of, COLUMNS)
        cells_of_line = (point.workload, point.model, f"{point.fraction:g}x", *rates, _share(point))
        table.add_row(*cells_of_line, ", ".join(point.failures))
    return table


def page(text: str, documents: Sequence[dict[str, Any]]) -> str:
    """`text`, a page, with what stands under `HEADING` of each half that was measured made anew; all else stays."""
    points = [Point(**{name: point[name] for name in Point.__slots__}) for d in documents for point in d["points"]]
    for half in (Half.REPORTING, Half.TUNING):
        of_half = [point for point in points if point.half == half]
        heading = HEADING.format(half=half.value)
        if not of_half:
            continue
        before, found, rest = text.partition(heading)
        if not found:
            raise ValueError(f"the page must have a line {heading.strip()!r}")
        _, next_heading, after = rest.partition("\n## ")
        text = before + "\n".join([heading, *_lines(of_half)]) + "\n" + next_heading + after
    return text


HEADING = "## The {half} half\n"


def _lines(points: Sequence[Point]) -> list[str]:
    closed, pooled = (f"{100 * share:.0f} %" for share in (mean_gap_closed(points), pooled_gap_closed(points)))
    failures = [f"{p.workload}, {p.model}, {p.fraction:g}: {', '.join(p.failures)}" for p in points if p.failures]
    lines = [
        f"Gap closed in the mean: **{closed}** ({pooled} of all gaps together). "
        + ("The bars are missed at: " + "; ".join(failures) + "." if failures else "Every bar is met."),
        "",
        "| workload | model | memory | " + " | ".join(COLUMNS) + " | gap closed |",
        "|---|---|---|" + "---:|" * (len(COLUMNS) + 1),
    ]
    for point in points:
        rates = " | ".join(map(point.rate_of, COLUMNS))
        place = f"{point.workload} | {point.model} | {point.fraction:g}"
        lines.append(f"| {place} | {rates} | {_share(point)} |")
    return lines


def workloads_in(folder: Path, names: str) -> list[Workload]:
    """Those whose name has one of `names`, parted by commas, in it; `ValueError` if a file is missing."""
    chosen = [workload for workload in WORKLOADS if any(part in workload.name for part in names.split(","))]
    missing = [workload.file for workload in chosen if not (folder / workload.file).is_file()]
    if missing or not chosen:
        raise ValueError(f"{folder} has no {missing[0] if missing else names}: give another folder")
    return chosen


def _of_traces(args: argparse.Namespace) -> dict[str, list[Point]]:
    """The points of recorded traces, by half; `ValueError` for a folder that lacks one."""
    if len(args.folder) != 1:
        raise ValueError(f"FOLDER must be one folder with the traces, got {len(args.folder)}")
    (folder,) = args.folder
    chosen = workloads_in(folder, args.workload)
    return {
        half.value: [point for workload in chosen for point in measure(folder, half, workload, args.jobs)]
        for half in (Half(name) for name in args.half.split(","))
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Token hit rates side by side.")
    parser.add_argument("folder", type=Path, nargs="*", metavar="FOLDER", help="with the traces")
    parser.add_argument("--generated", action="store_true", help="generated workloads, without a folder")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write its tables from result files, measure nothing")
    parser.add_argument("--half", default="tuning,reporting", metavar="LIST", help="default: tuning,reporting")
    parser.add_argument("--workload", default="", metavar="LIST", help="part of a name; default: all")
    parser.add_argument("--jobs", type=int, default=num_usable_cores(), metavar="N", help="default: one a core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every point there")
    args = parser.parse_args(argv)
    try:
        if args.page is not None:
            documents = [json.loads(each.read_text(encoding="utf-8")) for each in args.folder]
            args.page.write_text(page(args.page.read_text(encoding="utf-8"), documents), encoding="utf-8")
            return 0
        by_half = {"generated": measure_generated(args.jobs)} if args.generated else _of_traces(args)
    except (ValueError, OSError) as error:
        print(f"hit_rate.py: error: {error}", file=sys.stderr)
        return 2
    console = Console(width=max(Console().width, 200))
    for points in by_half.values():
        console.print(render(points))
    every = [point for points in by_half.values() for point in points]
    document = {
        "benchmark": "hit_rate",
        "gap_closed": {half: mean_gap_closed(points) for half, points in by_half.items()},
        "points": [point.to_json() for point in every],
    }
    if args.json is not None:
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    holds = all(mean_gap_closed(points) >= GOAL for points in by_half.values())
    return 0 if holds and not any(point.failures for point in every) else 1


if __name__ == "__main__":
    sys.exit(main())
