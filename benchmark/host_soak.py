"""Random requests in flight together on a server's real cache, under which no KV and no state may be lost.

Prompts share prefixes, fork, repeat and go on, in several name spaces; they are prefilled in chunks, aborted in every
phase, retracted when KV runs out, and the cache is flushed now and then (`rig.soak`). Pools hold two or
three of them. Every few steps all memory is accounted for, index by index, and the tree checked; every forward pass
reads what it should, and nothing holds a request that has ended. With `--host-ratio` a host tier is below, whose copies
arrive late and in any order (`rig/late_copies.py`). What is lost ends the run with the seed and the step, and exit
status 1. With `--ranks` as many ranks share the cache in lockstep, each with clocks of its own: they are compared
after every eighth step, and two that differ end the run.

    python benchmark/host_soak.py [--num-requests N] [--seed N] [--backend {stock,marconi}] [--eviction NAME]
                                  [--admission NAME] [--strategy extra_buffer|no_buffer] [--page N]
                                  [--kv-tokens N] [--memory two-pools|one-pool] [--host-ratio RATIO] [--ranks N]
                                  [--events] [--check-every STEPS] [--json FILE]
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.engine.launch.policies import ADMISSIONS, CHUNK_END, JUDICIOUS, PolicyChoice
from marconi.events.tree_log import TreeLog
from marconi.policy.catalog import SERVED
from marconi.replay.progress import metered
from rig.pools import Division, Strategy
from rig.ranks import Ranks, RanksParted
from rig.soak import Soak, SoakFailure, SoakPlan, soak_on_marconi, soak_on_stock, soak_pools

TTFT_BUDGET_S = 0.5


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description="Random requests on a server's real cache: nothing may be lost.")
    made.add_argument("--num-requests", type=int, default=50_000, metavar="N", help="default: 50,000")
    made.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    made.add_argument("--backend", choices=("stock", "marconi"), default="marconi", help="default: marconi")
    made.add_argument("--eviction", choices=SERVED, default="best", help="default: best")
    made.add_argument("--admission", choices=ADMISSIONS, default=JUDICIOUS)
    made.add_argument("--strategy", choices=[*Strategy], default=Strategy.EXTRA_BUFFER, help="default: extra_buffer")
    made.add_argument("--page", type=int, default=1, metavar="N", help="tokens in a page (default: 1)")
    made.add_argument(
        "--kv-tokens", type=int, default=480, metavar="N", help="a request takes at most 5/8 of them (default: 480)"
    )
    made.add_argument("--memory", choices=[*Division], default=Division.TWO_POOLS, help="default: two-pools")
    made.add_argument("--host-ratio", type=float, default=0.0, metavar="RATIO", help="host over device (default: none)")
    made.add_argument("--ranks", type=int, default=1, metavar="N", help="that share the cache (default: 1)")
    made.add_argument("--events", action="store_true", help="also hold the cache's events against its tree")
    made.add_argument("--check-every", type=int, default=4, metavar="STEPS", help="default: 4")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return made


def build(args: argparse.Namespace) -> Soak | Ranks:
    """The run that is asked for; raises `ValueError` for one that cannot be."""
    if args.ranks < 1:
        raise ValueError(f"--ranks must be 1 or more, got {args.ranks}")
    if args.page < 1:
        raise ValueError(f"--page must be 1 or more, got {args.page}")
    plan = SoakPlan(args.num_requests, args.seed, args.check_every)
    memory = Division(args.memory)
    strategy = Strategy(args.strategy)
    host = soak_pools(strategy, args.page, num_kv_tokens=args.kv_tokens, memory=memory, host_ratio=args.host_ratio)
    if args.backend == "stock":
        if args.events:
            raise ValueError("--events: --backend must be marconi, since stock's cache has no events of states")
        return soak_on_stock(host, plan)
    if memory is Division.ONE_POOL and args.admission == CHUNK_END:
        raise ValueError("--memory one-pool: the server takes it with --admission judicious alone")
    choice = PolicyChoice(args.eviction, admission=args.admission)
    if args.eviction == "tail":
        choice = replace(choice, ttft_budget_s=TTFT_BUDGET_S)
    if args.ranks > 1:
        if args.events or args.backend == "stock":
            raise ValueError("--ranks: --backend must be marconi, without --events")
        return Ranks(args.ranks, host, choice, host.costs, plan)
    return soak_on_marconi(host, plan, choice, TreeLog() if args.events else None)


def run(soak: Soak | Ranks, num_requests: int) -> str | None:
    """What failed; None if nothing did."""
    with metered("soak", num_requests) as progress:
        try:
            soak.run(progress.advance)
        except (SoakFailure, RanksParted) as failure:
            return str(failure)
    return None


def counted(soak: Soak | Ranks) -> dict[str, Any]:
    """What there was of everything, on the first rank."""
    num_ticks = 0
    if isinstance(soak, Ranks):
        num_ticks, soak = soak.num_ticks, soak.ranks[0].soak
    scheduler = soak.scheduler
    counts: dict[str, Any] = {
        "requests": soak.num_submitted,
        "steps": soak.num_steps,
        "checks": soak.num_checks,
        "drains": soak.num_drains,
        "flushes": soak.num_flushes,
        "origins": {str(origin): number for origin, number in sorted(soak.origins.items())},
        "outcomes": {str(outcome): number for outcome, number in sorted(scheduler.outcomes.items())},
        "prefills": scheduler.num_prefills,
        "unfinished_chunks": scheduler.num_chunks,
        "hit_tokens": scheduler.num_hit_tokens,
        "events": soak.num_events,
        "ticks": num_ticks,
    }
    if hasattr(scheduler.cache, "status"):
        status = scheduler.cache.status()
        counts["states_written"] = status.num_states_written
        counts["evictions"] = status.evictions
        host = scheduler.cache.host_use
        if host is not None:
            counts["of_the_host"] = {"copies": host.num_copied, "loads": host.num_loads}
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print and write; exit status 2 for bad input, 1 for a failure."""
    args = parser().parse_args(argv)
    # Retractions are the point: SGLang warns of each.
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        soak = build(args)
        start_s = time.perf_counter()
        failure = run(soak, args.num_requests)
        document = {
            "benchmark": "host_soak",
            **{name: str(getattr(args, name)) for name in ("backend", "eviction", "admission", "strategy", "memory")},
            "page_tokens": args.page,
            "host_ratio": args.host_ratio,
            "ranks": args.ranks,
            "seed": args.seed,
            **counted(soak),
            "seconds": round(time.perf_counter() - start_s, 1),
            "failure": failure,
        }
        if args.json is not None:
            args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"host_soak.py: error: {error}", file=sys.stderr)
        return 2
    Console().print(render(document))
    return 0 if failure is None else 1


def render(document: dict[str, Any]) -> Table:
    """A line a figure."""
    verdict = "nothing was lost" if document["failure"] is None else document["failure"]
    table = Table("figure", box=SIMPLE, title=f"{document['requests']:,} requests: {verdict}")
    table.add_column("", justify="right")
    for name, figure in document.items():
        figures = figure if isinstance(figure, dict) else {"": figure}
        for kind, number in figures.items():
            if isinstance(number, int | float):
                label = f"{name.replace('_', ' ')}{': ' if kind else ''}{kind.replace('_', ' ')}"
                table.add_row(label, f"{number:,}")
    return table


if __name__ == "__main__":
    sys.exit(main())
