"""How fast a replay runs: requests a second of one core, serial mode, for several policies.

Each policy is replayed `--repeat` times on a cache of its own and the fastest counts, by the processor time of this
process: other load on the machine then matters little. What is timed is the replay with its times to first token, not
the reading of the trace. One process, one memory.

    python benchmark/replay.py [TRACE] [--model NAME] [--memory AMOUNT] [--policy LIST] [--repeat N] [--json FILE]
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.model import PrefillLatency, load
from marconi.model.device import device
from marconi.policy.catalog import PolicySpec, parse_list
from marconi.replay.catalog import resolve_policy
from marconi.replay.grid import execute
from marconi.replay.inputs import resolve
from marconi.replay.memory import MemorySize
from marconi.replay.progress import metered
from marconi.replay.task import ReplayInputs, Task
from marconi.replay.trace import Demand, generate, preset, read

DEFAULT_POLICIES = "lru,lru-joint,marconi-static:1"
GOAL_PER_S = 20_000
MADE_UP = Demand(num_sessions=500, session_rate=1.0)
MADE_UP_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests a second of processor time, and what the replay gave, so that speed is not had for nothing."""

    policy: str
    requests_per_s: float
    token_hit_rate: float


def measure(inputs: ReplayInputs, policies: Sequence[PolicySpec], memory_bytes: int, num_repeats: int) -> list[Rate]:
    """The fastest of `num_repeats` replays of each policy."""
    rates = []
    with metered("replay", len(policies) * num_repeats) as meter:
        for policy in policies:
            seconds = []
            for _ in range(num_repeats):
                start_s = time.process_time()
                run = execute(inputs, Task(policy, memory_bytes))
                seconds.append(time.process_time() - start_s)
                meter.advance(1)
            rates.append(Rate(str(policy), len(inputs.trace.requests) / min(seconds), run.token_hit_rate))
    return rates


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit status 2 for bad input."""
    parser = argparse.ArgumentParser(description="How fast a replay runs.")
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="default: a made-up chat workload, in blocks")
    parser.add_argument("--model", default="qwen3-next-80b-a3b", metavar="NAME", help="default: qwen3-next-80b-a3b")
    parser.add_argument("--memory", default="0.05x", metavar="AMOUNT", help="default: 0.05x of an unbounded cache")
    parser.add_argument("--policy", default=DEFAULT_POLICIES, metavar="LIST", help=f"default: {DEFAULT_POLICIES}")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="the fastest counts (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rates there")
    args = parser.parse_args(argv)
    try:
        if args.repeat < 1:
            raise ValueError(f"--repeat must be 1 or more, got {args.repeat}")
        memory, policies = MemorySize.parse(args.memory), parse_list(args.policy)
        for policy in policies:
            if resolve_policy(policy).make is None:
                raise ValueError(f"policy {str(policy)!r} is the best of several replays: time one of them")
        model, on = load(args.model), device("h100")
        trace = (
            generate(preset("chat-short"), MADE_UP, MADE_UP_BLOCK_TOKENS) if args.trace is None else read(args.trace)
        )
        inputs = ReplayInputs(trace, model, on, PrefillLatency(model, on))
        (memory_bytes,), _, _ = resolve([memory], inputs)
        rates = measure(inputs, policies, memory_bytes, args.repeat)
        document = {
            "benchmark": "replay",
            "python": platform.python_version(),
            "machine": platform.machine(),
            "trace": trace.name,
            "num_requests": len(trace.requests),
            "model": model.name,
            "memory_bytes": memory_bytes,
            "goal_requests_per_s": GOAL_PER_S,
            "rates": [{name: getattr(rate, name) for name in rate.__slots__} for rate in rates],
        }
        if args.json is not None:
            args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"replay.py: error: {error}", file=sys.stderr)
        return 2
    table = Table("policy", box=SIMPLE, title=f"{trace.name}, {len(trace.requests):,} requests, {model.name}")
    table.add_column(f"requests/s (goal {GOAL_PER_S:,})", justify="right")
    table.add_column("hit rate", justify="right")
    for rate in rates:
        table.add_row(rate.policy, f"{rate.requests_per_s:,.0f}", f"{100 * rate.token_hit_rate:.2f} %")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
