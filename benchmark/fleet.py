"""A fleet of simulated workers behind each rule of routing, at equal total memory, on recorded traces.

Workloads, models and halves as `hit_rate.py` has them. Memory is in shares of what an unbounded cache holds at the end,
the fleet's in all. Workers have this project's cache (`best`) or stock SGLang's (`lru`: two pools, states at chunk
ends).

    python benchmark/fleet.py FOLDER_OF_TRACES [--half HALF] [--workload PART] [--model LIST] [--policy LIST]
                              [--memory LIST] [--replicas LIST] [--jobs N] [--json FILE]

What is asked of each point: under `state-aware` P95 of the time to first token is at most 1.2 times the least of all
rules, and the token hit rate at most a point below the highest among the rules that keep that P95.

Prints rows of Markdown as they come. Exit status 1 if anything fails, 2 for bad input.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet_shapes import DEFAULT, LESS_HITS, TIMES_P95, lost_hits, markdown_row, times_least
from marconi.model import PrefillLatency, load
from marconi.model.device import device
from marconi.policy.catalog import PolicySpec
from marconi.replay.grid import run_tasks
from marconi.replay.parallel import num_usable_cores, run_all
from marconi.replay.task import ReplayInputs, Task, unbounded_bytes
from marconi.replay.trace import Half, ReadOptions, read
from marconi_lab.fleet.task import FleetTask, execute
from marconi_lab.fleet.variants import VARIANTS, Key

MODELS = "qwen3-next-80b-a3b,nemotron-h-8b"
WORKLOADS = (("coding-agent.tar.xz", 0.02), ("mooncake-conversation.jsonl.gz", None))
"""A file of the folder, and the rate of its sessions where their times are relative."""
ROUTERS = ("least-loaded", "sticky-hash", "sticky-session", "own-tree", "kv-only", "kv-only-placed", DEFAULT)
HEAD = ("workload", "model", "cache", "memory", "workers", "one cache", *ROUTERS, "fails")


@dataclass(frozen=True, slots=True)
class Point:
    """Every rule before one fleet."""

    half: str
    workload: str
    model: str
    policy: str
    fraction: float
    num_replicas: int
    single: float
    """Token hit rate of one cache of the whole memory."""
    runs: dict[str, dict[str, Any]]
    """By rule, as a report has them; without those that the trace has no sessions for."""

    def rate(self, router: str) -> float:
        """Token hit rate."""
        return float(self.runs[router]["token_hit_rate"])

    @property
    def failures(self) -> tuple[str, ...]:
        """What is asked and does not hold."""
        rates = {name: self.rate(name) for name in self.runs}
        p95_s = {name: float(run["ttft_s"]["p95"]) for name, run in self.runs.items()}
        times, lost = times_least(p95_s, DEFAULT), lost_hits(rates, p95_s, DEFAULT)
        failed = [f"P95 {times:.2f}x the least"] if times > TIMES_P95 else []
        return (*failed, *([f"{100 * lost:.1f} points of hits"] if lost > LESS_HITS else []))

    @property
    def row(self) -> str:
        """A row of Markdown: token hit rates in %, and P95 of the time to first token."""
        cells = []
        for name in ROUTERS:
            run = self.runs.get(name)
            cells.append("-" if run is None else f"{100 * self.rate(name):.1f} ({run['ttft_s']['p95']:.2g} s)")
        place = (self.workload, self.model, self.policy, f"{self.fraction:g}", str(self.num_replicas))
        return markdown_row((*place, f"{100 * self.single:.1f}", *cells, ", ".join(self.failures) or "-"))

    def to_json(self) -> dict[str, Any]:
        """As the result file holds it."""
        return {**{name: getattr(self, name) for name in self.__slots__}, "failures": list(self.failures)}


def measure(inputs: ReplayInputs, workload: str, args: argparse.Namespace) -> list[Point]:
    """Every point of a workload and a model, printed as it comes."""
    has_sessions = any(request.session >= 0 for request in inputs.trace.requests)
    variants = [VARIANTS[name] for name in ROUTERS if has_sessions or VARIANTS[name].key is not Key.SESSION]
    total = unbounded_bytes(inputs)
    points = []
    for policy in args.policy.split(","):
        for fraction in map(float, args.memory.split(",")):
            task = Task(PolicySpec.parse(policy), max(1, int(fraction * total)))
            (single,) = run_tasks(inputs, [task], args.jobs, lambda _: None)
            for count in map(int, args.replicas.split(",")):
                tasks = [FleetTask(task.policy, task.memory_bytes, count, variant) for variant in variants]
                results = run_all(execute, inputs, tasks, args.jobs, lambda _: None)
                rate = single.token_hit_rate
                runs = {each.router: each.to_json(timings=False) for each in results}
                point = Point(args.half, workload, inputs.model.name, policy, fraction, count, rate, runs)
                print(point.row, flush=True)
                points.append(point)
    return points


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="Rules of routing side by side, on simulated fleets.")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="with the traces")
    parser.add_argument("--half", default="reporting", choices=[half.value for half in Half])
    parser.add_argument("--workload", default="", metavar="PART", help="of a file's name; default: all")
    parser.add_argument("--model", default=MODELS, metavar="LIST", help=f"default: {MODELS}")
    parser.add_argument("--policy", default="best,lru", metavar="LIST", help="of the workers (default: best,lru)")
    parser.add_argument("--memory", default="0.05,0.1,0.2", metavar="LIST", help="default: 0.05,0.1,0.2")
    parser.add_argument("--replicas", default="8,64", metavar="LIST", help="default: 8,64")
    parser.add_argument("--jobs", type=int, default=num_usable_cores(), metavar="N", help="default: one a core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every point there")
    args = parser.parse_args(argv)
    points: list[Point] = []
    try:
        chosen = [(file, rate) for file, rate in WORKLOADS if args.workload in file]
        missing = [file for file, _ in chosen if not (args.folder / file).is_file()]
        if missing or not chosen:
            raise ValueError(f"{args.folder} has no {missing[0] if missing else args.workload}: give another folder")
        print(markdown_row(HEAD), markdown_row(["---"] * len(HEAD)), sep="\n", flush=True)
        for file, rate in chosen:
            trace = read(args.folder / file, ReadOptions(session_rate=rate, half=Half(args.half)))
            for name in args.model.split(","):
                model, on = load(name), device("h100")
                inputs = ReplayInputs(trace, model, on, PrefillLatency(model, on))
                points += measure(inputs, file.split(".")[0], args)
    except (ValueError, OSError) as error:
        print(f"fleet.py: error: {error}", file=sys.stderr)
        return 2
    if args.json is not None:
        document = {"benchmark": "fleet", "points": [point.to_json() for point in points]}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if any(point.failures for point in points) else 0


if __name__ == "__main__":
    sys.exit(main())
