"""What tuning costs: a window of requests under joint LRU and each value of the grid, and what of it the caller sees.

A cache is filled by all of a trace but its last requests, which are the window; the tuner beside it is then driven as
a server drives it. Timed, at the caller: one `observe`, the `poll` that takes the first snapshot, the `poll` that hands
the window over (packing it, sending it off, the next window's snapshot) and, from its beginning to the decision, the
trials. The processes' start is apart. Afterwards the same trials run in line: where a score differs, no figure.

Without a trace, conversations under shared system prompts are made up. Read the figures as those of a machine whose
other work shares the cores; the least of several runs is shown.

    python benchmark/tuner.py [TRACE] [--num-requests N] [--num-workers N] [--memory SHARE] [--model NAME] [--json FILE]
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.model import ModelProfile, PrefillLatency, load
from marconi.model.device import device
from marconi.policy.admission.plan import Judicious
from marconi.policy.eviction.base import Costs
from marconi.policy.eviction.lru import JointLru
from marconi.policy.eviction.utility import ALPHAS, UtilityEviction
from marconi.policy.request import Request, Trace, pack
from marconi.replay.policies.tuned import ServerCaches
from marconi.replay.pools import JointPool
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.replay.task import World, unbounded_bytes
from marconi.replay.trace.formats import read
from marconi.tree import RadixTree
from marconi.tree.snapshot import TreeSnapshot, take_snapshot
from marconi.tuning import (
    Decision,
    ProcessWorkers,
    Schedule,
    Setup,
    TunableTree,
    Tuner,
    pack_window,
    run_trials,
)

SEED = 1
BLOCK_TOKENS = 512
MAX_GHOSTS = 20_000
NUM_RUNS = 3
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run, or the least of several. Times as named."""

    num_nodes: int
    """Of the snapshot, ghosts included."""
    num_sent_bytes: int
    """Window and snapshot, once a process."""
    pool_start_s: float
    observe_us: float
    snapshot_ms: float
    hand_over_ms: float
    trials_s: float


def made_up(num_requests: int) -> Trace:
    """Turns of conversations under shared system prompts, in blocks."""
    rng = np.random.default_rng(SEED)
    systems = [list(range(1000 * index, 1000 * index + int(rng.integers(1, 12)))) for index in range(16)]
    next_id = 100_000
    chats: list[list[int]] = []
    requests = []
    for index in range(num_requests):
        if len(chats) < 500 or rng.random() < 0.2:
            chats.append(systems[int(rng.integers(len(systems)))])
        chat = int(rng.integers(max(0, len(chats) - 500), len(chats)))
        num_new, num_output = int(rng.integers(1, 24)), int(rng.integers(1, 3))
        path = [*chats[chat], *range(next_id, next_id + num_new + num_output)]
        next_id += num_new + num_output
        chats[chat] = path
        num_tokens, num_output_tokens = len(path) * BLOCK_TOKENS, num_output * BLOCK_TOKENS
        requests.append(
            Request(pack(path), num_tokens - num_output_tokens, num_output_tokens, num_tokens, 0.5 * index, chat)
        )
    return Trace("made up", BLOCK_TOKENS, tuple(requests))


class Live(TunableTree):
    """Keeps the snapshots' times."""

    def __init__(self, server: ServerReplay) -> None:
        super().__init__(server.served, partial(setattr, server.served.tiers.rule, "weight"))
        self.snapshots_s: list[float] = []

    def snapshot(self) -> TreeSnapshot:
        """The cache's tree."""
        start = time.perf_counter()
        taken = super().snapshot()
        self.snapshots_s.append(time.perf_counter() - start)
        return taken


def memory_of(trace: Trace, profile: ModelProfile, share: float) -> int:
    """`share` of the bytes that an unbounded cache holds at the end of the trace."""
    whole = unbounded_bytes(World(trace, profile, device("h100"), PrefillLatency(profile, device("h100"))))
    return max(1, int(share * whole))


def costs_of(profile: ModelProfile) -> Costs:
    """What a checkpoint of the model takes and saves."""
    return Costs(profile.kv_bytes_per_token, profile.state_bytes, profile.prefix_flops)


def setup_of(trace: Trace, profile: ModelProfile, memory_bytes: int) -> Setup:
    """The paper's policy in so much memory."""
    costs, unit = costs_of(profile), trace.unit_tokens
    admission = Judicious(unit)
    memory = partial(JointPool, memory_bytes, costs.kv_bytes_per_token, costs.state_bytes, unit)
    caches = ServerCaches(admission, memory, Scheduling.of(admission, unit))
    return Setup(partial(UtilityEviction, costs), caches, reference=JointLru)


def measure(trace: Trace, setup: Setup, num_requests: int, num_workers: int) -> Figures:
    """One run; `SystemExit` where nothing is evicted before the window, or a process scores other than the caller."""
    eviction = setup.eviction(0.0)
    cache = setup.cache(RadixTree(trace.unit_tokens, MAX_GHOSTS), eviction)
    assert isinstance(cache, ServerReplay)
    before, window = trace.requests[:-num_requests], trace.requests[-num_requests:]
    for request in before:
        cache.serve(request)
    live = Live(cache)
    if not live.has_evicted:
        raise SystemExit(f"nothing was evicted in the {len(before)} requests before the window: give less --memory")
    start = time.perf_counter()
    workers = ProcessWorkers(num_workers)
    workers.wait_until_ready()
    pool_start_s = time.perf_counter() - start
    schedule = Schedule(min_requests=num_requests, max_requests=num_requests)
    tuner = Tuner(live, setup, workers, schedule)
    try:
        tuner.poll()
        first = take_snapshot(cache.served.tree)
        observe_s = 0.0
        for request in window:
            cache.serve(request)
            start = time.perf_counter()
            tuner.observe(request)
            observe_s += time.perf_counter() - start
        gc.collect()
        start = time.perf_counter()
        decision = tuner.poll()
        hand_over_s = time.perf_counter() - start
        while decision is None and time.perf_counter() - start < TIMEOUT_S:
            time.sleep(0.002)
            decision = tuner.poll()
        trials_s = time.perf_counter() - start
    finally:
        tuner.close()
    packed = pack_window(first, window)
    check(decision, dict(run_trials(packed, setup, (None, *ALPHAS))))
    return Figures(
        num_nodes=first.num_nodes,
        num_sent_bytes=packed.num_bytes,
        pool_start_s=pool_start_s,
        observe_us=observe_s / num_requests * 1e6,
        snapshot_ms=live.snapshots_s[0] * 1e3,
        hand_over_ms=hand_over_s * 1e3,
        trials_s=trials_s,
    )


def check(decision: Decision | None, inline: dict[float | None, float]) -> None:
    """Raise `SystemExit` unless the processes' scores are those of the caller."""
    if decision is None:
        raise SystemExit(f"no decision within {TIMEOUT_S:.0f} s")
    if decision.failure:
        raise SystemExit(f"the trials failed: {decision.failure}")
    found: dict[float | None, float] = dict(decision.scores)
    if decision.reference_score is not None:
        found[None] = decision.reference_score
    wrong = {value: (score, inline[value]) for value, score in found.items() if score != inline[value]}
    if wrong:
        raise SystemExit(f"scores of processes and caller differ, so there are no figures: {wrong}")


def least(runs: list[Figures]) -> Figures:
    """The least of each figure."""
    rows = [asdict(run) for run in runs]
    return Figures(**{name: min(row[name] for row in rows) for name in rows[0]})


def table(figures: Figures, title: str) -> Table:
    """The figures, one a row."""
    shown = Table(title=title, box=SIMPLE, title_justify="left")
    shown.add_column("")
    shown.add_column("", justify="right")
    shown.add_row("nodes in the snapshot", f"{figures.num_nodes:,}")
    shown.add_row("sent to each process", f"{figures.num_sent_bytes / 1e6:.2f} MB")
    shown.add_row("processes' start, once", f"{figures.pool_start_s:.2f} s")
    shown.add_row("observe, a request (caller)", f"{figures.observe_us:.2f} us")
    shown.add_row("snapshot, a window (caller)", f"{figures.snapshot_ms:.1f} ms")
    shown.add_row("hand over with snapshot, a window (caller)", f"{figures.hand_over_ms:.1f} ms")
    shown.add_row("trials, from hand-over to decision", f"{figures.trials_s:.2f} s")
    return shown


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="What tuning costs.")
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="any format that the replay reads")
    parser.add_argument("--num-requests", type=int, default=1000, metavar="N", help="in the window (1000)")
    parser.add_argument("--num-workers", type=int, default=2, metavar="N", help="processes (2)")
    parser.add_argument("--memory", type=float, default=0.05, metavar="SHARE", help="of an unbounded cache's (0.05)")
    parser.add_argument("--model", default="qwen3-next-80b-a3b", metavar="NAME", help="a profile or a config.json")
    parser.add_argument("--num-runs", type=int, default=NUM_RUNS, metavar="N", help=f"the least counts ({NUM_RUNS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of every run there")
    parsed = parser.parse_args(argv)
    for name in ("num_requests", "num_workers", "num_runs"):
        if getattr(parsed, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {getattr(parsed, name)}")
    if not 0 < parsed.memory <= 1:
        parser.error(f"--memory must be a share above 0 and up to 1, got {parsed.memory}")
    return parsed


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    options = arguments(argv)
    try:
        trace = read(options.trace) if options.trace else made_up(10 * options.num_requests)
        profile = load(options.model)
    except (ValueError, OSError) as error:
        print(f"tuner: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if len(trace.requests) <= options.num_requests:
        print(f"tuner: {trace.name} has {len(trace.requests)} requests, no more than the window", file=sys.stderr)
        raise SystemExit(2)
    memory_bytes = memory_of(trace, profile, options.memory)
    setup = setup_of(trace, profile, memory_bytes)
    runs = [measure(trace, setup, options.num_requests, options.num_workers) for _ in range(options.num_runs)]
    title = (
        f"{options.num_requests} requests x {len(ALPHAS)} values, {options.num_workers} processes, "
        f"{os.cpu_count()} cores: {trace.name}, {profile.name}, {options.memory:g} of the unbounded bytes"
    )
    Console().print(table(least(runs), title))
    if options.json:
        record = {
            "trace": trace.name,
            "model": profile.name,
            "seed": SEED,
            "memory_bytes": memory_bytes,
            "num_requests": options.num_requests,
            "num_values": len(ALPHAS),
            "num_workers": options.num_workers,
            "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
            "runs": [asdict(run) for run in runs],
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
