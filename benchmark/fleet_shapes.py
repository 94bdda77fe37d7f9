"""Rules of routing over made-up shapes of traffic and loads, to find the one that never loses.

    shape      system (one system prompt of 1,500 tokens), documents (24 of 6,000 tokens), agents, chats, conversations
               (of four turns, which share nothing), random
    load       sessions start so fast that prefills without any cache would take 0.1, 0.5 or 1.1 of the fleet's time
    memory     the fleet's, in shares of what an unbounded cache holds at the end; 3 GB a worker or more
    gateways   routers that know of each other's requests only by the workers; they get the requests in turn

    python benchmark/fleet_shapes.py [--small] [--shape LIST] [--load LIST] [--replicas LIST] [--memory LIST]
                                     [--gateways LIST] [--policy POLICY] [--silent] [--router LIST] [--seeds N]
                                     [--jobs N] [--json FILE]

At each point, over the means of all seeds: a rule *holds* if its P95 of the time to first token is at most 1.2 times
the least of all rules, and its token hit rate at most a point below the highest among the rules that keep that P95.
Prints a row of Markdown a point as it comes, hits in % and P95, an exclamation mark where a rule does not hold, and a
row for each rule at the end. With `--silent` workers do not tell their load. `--small` takes some minutes. Exit status
1 if `state-aware` does not hold somewhere, 2 for bad input.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from marconi.model import PrefillLatency, load
from marconi.model.device import device
from marconi.policy.catalog import PolicySpec
from marconi.policy.request import Trace
from marconi.replay.parallel import num_usable_cores, run_all
from marconi.replay.task import ReplayInputs, unbounded_bytes
from marconi.replay.trace import Demand, generate, preset
from marconi.replay.trace.arrivals import Pace
from marconi.replay.trace.workload import Skewed, SystemPrompts, Workload
from marconi_lab.fleet.result import FleetRun
from marconi_lab.fleet.task import FleetTask, execute
from marconi_lab.fleet.variants import VARIANTS

DEFAULT: Final = "state-aware"
ROUTERS: Final = (
    *("round-robin", "least-loaded", "sticky-session", "own-tree", "kv-only", "kv-only-placed"),
    DEFAULT,
)
MODEL: Final = "nemotron-h-8b"
BLOCK_TOKENS: Final = 64
MIN_WORKER_BYTES: Final = 3_000_000_000
MAX_SESSIONS: Final = 1_500
TIMES_P95: Final = 1.2
LESS_HITS: Final = 0.01
LOADS: Final = MappingProxyType({"idle": 0.1, "half": 0.5, "full": 1.1})


def _asked(turns: float, first: float, following: float, prompts: SystemPrompts, pause_s: float) -> Workload:
    """Sessions of a few turns after a prompt that they share."""
    return Workload(
        "asked",
        turns=Skewed(turns, 0.5, 1, 8),
        first_prompt=Skewed(first, 0.7, 5, 500),
        next_prompt=Skewed(following, 0.7, 5, 500),
        output=Skewed(200, 0.6, 10, 800),
        pace=Pace(think_time_s=pause_s),
        system_prompts=prompts,
    )


SHAPES: Final = MappingProxyType(
    {
        "system": _asked(3, 60, 60, SystemPrompts(1, 1_500), 10.0),
        "documents": _asked(2, 100, 80, SystemPrompts(24, 6_000), 15.0),
        "agents": replace(preset("agent-append"), max_context_tokens=65_536),
        "chats": preset("chat-short"),
        "conversations": _asked(4, 300, 100, SystemPrompts(0, 0), 15.0),
        "random": replace(
            _asked(1, 60, 60, SystemPrompts(0, 0), 5.0),
            turns=Skewed(1, 0, 1, 1),
            first_prompt=Skewed(2_000, 0.8, 100, 16_000),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Place:
    """One shape, load, fleet and memory."""

    shape: str
    load: str
    num_replicas: int
    memory: float
    num_gateways: int


@dataclass(frozen=True, slots=True)
class Point:
    """Every rule at one place."""

    place: Place
    num_requests: int
    """Of one seed, in the mean."""
    hit_rate: dict[str, float]
    p95_s: dict[str, float]

    def times(self, router: str) -> float:
        """P95 over the least of all rules."""
        return times_least(self.p95_s, router)

    def lost(self, router: str) -> float:
        """Hit rate below the highest of the rules that keep the P95; negative above it."""
        return lost_hits(self.hit_rate, self.p95_s, router)

    def holds(self, router: str) -> bool:
        """What is asked of a rule."""
        return self.times(router) <= TIMES_P95 and self.lost(router) <= LESS_HITS

    @property
    def row(self) -> str:
        """A row of Markdown."""
        cells = [
            f"{100 * rate:.1f} ({self.p95_s[router]:.2g} s){'' if self.holds(router) else ' !'}"
            for router, rate in self.hit_rate.items()
        ]
        return markdown_row((*(f"{getattr(self.place, name)}" for name in Place.__slots__), *cells))


def times_least(p95_s: Mapping[str, float], router: str) -> float:
    """P95 under a rule over the least of all rules."""
    return p95_s[router] / min(p95_s.values())


def lost_hits(hit_rate: Mapping[str, float], p95_s: Mapping[str, float], router: str) -> float:
    """Hit rate below the highest of the rules that keep the P95; negative above it."""
    return max(rate for each, rate in hit_rate.items() if times_least(p95_s, each) <= TIMES_P95) - hit_rate[router]


def markdown_row(cells: Sequence[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(cells) + " |"


def summary(points: Sequence[Point]) -> str:
    """A row of Markdown for each rule."""
    rows = [
        markdown_row(("rule", "holds at", "P95 over the best, geometric mean", "most", "hits lost, mean", "most")),
        markdown_row(["---"] * 6),
    ]
    for router in points[0].hit_rate:
        times, lost = [point.times(router) for point in points], [100 * point.lost(router) for point in points]
        mean = math.exp(sum(map(math.log, times)) / len(times))
        num_held = sum(point.holds(router) for point in points)
        figures = (f"{mean:.2f}", f"{max(times):.2f}", f"{sum(lost) / len(lost):.1f}", f"{max(lost):.1f}")
        rows.append(markdown_row((router, f"{num_held} of {len(points)}", *figures)))
    return "\n".join(rows)


def _trace(shape: str, load_name: str, num_replicas: int, num_sessions: int, seed: int, inputs: ReplayInputs) -> Trace:
    """Sessions of a shape at the rate of a load; `inputs` says how long its prefills take."""
    sample = generate(SHAPES[shape], Demand(100, 1.0, seed + 1_000), BLOCK_TOKENS)
    work_s = sum(inputs.latency.seconds(0, each.num_prompt_tokens) for each in sample.requests) / 100
    demand = Demand(num_sessions, LOADS[load_name] * num_replicas / work_s, seed)
    return generate(SHAPES[shape], demand, BLOCK_TOKENS)


def measure(args: argparse.Namespace) -> Iterator[Point]:
    """Every point."""
    model, on = load(MODEL), device("h100")
    empty = ReplayInputs(Trace("none", BLOCK_TOKENS, ()), model, on, PrefillLatency(model, on))
    per_worker = 40 if args.small else 80
    for shape in args.shape.split(","):
        for num_replicas in map(int, args.replicas.split(",")):
            num_sessions = min(per_worker * num_replicas, MAX_SESSIONS)
            for load_name in args.load.split(","):
                all_inputs = [
                    replace(empty, trace=_trace(shape, load_name, num_replicas, num_sessions, seed, empty))
                    for seed in range(args.seeds)
                ]
                for memory, num_gateways in product(
                    map(float, args.memory.split(",")), map(int, args.gateways.split(","))
                ):
                    place = Place(shape, load_name, num_replicas, memory, num_gateways)
                    yield _point(place, [_runs(inputs, place, args) for inputs in all_inputs])


def _runs(inputs: ReplayInputs, place: Place, args: argparse.Namespace) -> list[FleetRun]:
    num_bytes = int(max(place.memory * unbounded_bytes(inputs), place.num_replicas * MIN_WORKER_BYTES))
    policy, is_told = PolicySpec.parse(args.policy), not args.silent
    tasks = [
        FleetTask(
            policy,
            num_bytes,
            place.num_replicas,
            VARIANTS[name],
            num_gateways=place.num_gateways,
            reports_load=is_told,
        )
        for name in args.router.split(",")
    ]
    return run_all(execute, inputs, tasks, args.jobs, lambda _: None)


def _point(place: Place, seeds: Sequence[list[FleetRun]]) -> Point:
    by_router = list(zip(*seeds, strict=True))
    return Point(
        place,
        sum(runs[0].num_requests for runs in seeds) // len(seeds),
        {runs[0].router: sum(run.token_hit_rate for run in runs) / len(runs) for runs in by_router},
        {runs[0].router: sum(run.ttft_s.p95 for run in runs) / len(runs) for runs in by_router},
    )


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description="Rules of routing over made-up shapes of traffic and loads.")
    made.add_argument("--small", action="store_true", help="two workers, fewer sessions")
    made.add_argument("--shape", default=",".join(SHAPES), metavar="LIST", help=f"default: {','.join(SHAPES)}")
    made.add_argument("--load", default=",".join(LOADS), metavar="LIST", help=f"default: {','.join(LOADS)}")
    made.add_argument("--replicas", metavar="LIST", help="default: 2,8,64, or with --small 2")
    made.add_argument("--memory", default="0.1,0.5,1.0", metavar="LIST", help="default: 0.1,0.5,1.0")
    made.add_argument("--gateways", default="1,3", metavar="LIST", help="default: 1,3")
    made.add_argument("--policy", default="best", metavar="POLICY", help="of the workers' caches (default: best)")
    made.add_argument("--silent", action="store_true", help="workers do not tell their load")
    made.add_argument("--router", default=",".join(ROUTERS), metavar="LIST", help=f"default: {','.join(ROUTERS)}")
    made.add_argument("--seeds", type=int, metavar="N", help="traces of each shape (default: 3, or with --small 2)")
    made.add_argument("--jobs", type=int, default=num_usable_cores(), metavar="N", help="default: one a core")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every point there")
    return made


def _require_known(args: argparse.Namespace) -> None:
    for option, known in (("shape", SHAPES), ("load", LOADS), ("router", VARIANTS)):
        for name in getattr(args, option).split(","):
            if name not in known:
                raise ValueError(f"--{option} must be some of {', '.join(known)}, got {name!r}")
    if args.seeds < 1:
        raise ValueError(f"--seeds must be 1 or more, got {args.seeds}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    args = parser().parse_args(argv)
    args.replicas = args.replicas or ("2" if args.small else "2,8,64")
    args.seeds = (2 if args.small else 3) if args.seeds is None else args.seeds
    points: list[Point] = []
    try:
        _require_known(args)
        head = ("shape", "load", "workers", "memory", "gateways", *args.router.split(","))
        print(markdown_row(head), markdown_row(["---"] * len(head)), sep="\n", flush=True)
        for point in measure(args):
            print(point.row, flush=True)
            points.append(point)
    except (ValueError, OSError) as error:
        print(f"fleet_shapes.py: error: {error}", file=sys.stderr)
        return 2
    print("", summary(points), sep="\n")
    if args.json is not None:
        document: dict[str, Any] = {"benchmark": "fleet-shapes", "points": [asdict(point) for point in points]}
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 1 if DEFAULT in points[0].hit_rate and not all(point.holds(DEFAULT) for point in points) else 0


if __name__ == "__main__":
    sys.exit(main())
