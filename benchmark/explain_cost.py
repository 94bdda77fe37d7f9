"""What explaining a request costs the thread that serves it, and how exact it is, on generated conversations.

Requests of agents are served one after the other from the cache of a server, in the memory of a share of what all of
them would take, with prompts of some 10,000 to 60,000 tokens. Timed is all that a request pays for its explanation:
`HybridCache.begin` asks `Misses.explain`, whose time is taken alone. What a request pays for noting why states are
gone, one tuple an eviction, is in neither.

    python benchmark/explain_cost.py [--num-sessions N] [--memory SHARE] [--check] [--json FILE]

Exit status 1, with `--check`: the 99th percentile takes longer than `MAX_US`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.model import PrefillLatency, load
from marconi.model.device import device
from marconi.policy.catalog import PolicySpec
from marconi.policy.misses import Explanation
from marconi.policy.request import Lease
from marconi.replay.policies import build
from marconi.replay.result import nearest_rank, write
from marconi.replay.server import ServerReplay
from marconi.replay.task import Task, World, unbounded_bytes
from marconi.replay.trace import Demand, generate, preset

MAX_US = 30.0
_WORKLOAD, _MODEL = "agent-append", "qwen3-next-80b-a3b"


def measured(num_sessions: int, share: float, seed: int = 0) -> tuple[list[float], int, int]:
    """Microseconds of the thread for each explanation, rising, the prompt tokens, and those that were missed."""
    model = load(_MODEL)
    trace = generate(preset(_WORKLOAD), Demand(num_sessions=num_sessions, session_rate=1.0, seed=seed), 1)
    world = World(trace, model, device("h100"), PrefillLatency(model, device("h100")))
    task = Task(PolicySpec("best"), int(share * unbounded_bytes(world)))
    cache = build(task.policy, task.setting(world)).cache
    assert isinstance(cache, ServerReplay)
    misses, took_s = cache.hybrid.misses, list[float]()
    explain = misses.explain

    def timed(lease: Lease, grid_tokens: int) -> Explanation:
        start_s = time.thread_time()
        explanation = explain(lease, grid_tokens)
        took_s.append(time.thread_time() - start_s)
        return explanation

    misses.explain = timed  # type: ignore[method-assign]
    num_hit_tokens = sum(map(cache.serve, trace.requests))
    num_prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests)
    num_missed_tokens = sum(cache.counters.num_missed_tokens.values())
    assert num_hit_tokens + num_missed_tokens == num_prompt_tokens, "every token is cached or missed for one cause"
    return sorted(1e6 * each for each in took_s), num_prompt_tokens, num_missed_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="What explaining a request costs the thread that serves it.")
    parser.add_argument("--num-sessions", type=int, default=60, metavar="N", help="default: 60")
    parser.add_argument("--memory", type=float, default=0.1, metavar="SHARE", help="of all they take (default: 0.1)")
    parser.add_argument("--check", action="store_true", help=f"fail beyond {MAX_US:g} microseconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    took_us, num_prompt_tokens, num_missed_tokens = measured(args.num_sessions, args.memory)
    at_us = {percent: nearest_rank(took_us, percent) for percent in (50, 95, 99)}
    table = Table(box=SIMPLE, title="explaining a request, microseconds")
    for name in ("requests", "prompt tokens", "missed", *(f"p{percent}" for percent in at_us)):
        table.add_column(name, justify="right")
    counts = (f"{each:,}" for each in (len(took_us), num_prompt_tokens, num_missed_tokens))
    table.add_row(*counts, *(f"{each:.1f}" for each in at_us.values()))
    Console().print(table)
    if args.json is not None:
        write(args.json, {"num_requests": len(took_us), "microseconds": {f"p{key}": at_us[key] for key in at_us}})
    return int(args.check and at_us[99] > MAX_US)


if __name__ == "__main__":
    sys.exit(main())
