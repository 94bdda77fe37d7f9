"""What events cost the scheduler: its thread, and the interpreter that it shares with the publisher's thread.

    request    the cache's work for a request (match, plan, what joins the tree, victims), with events and without: two
               real caches on pools of the host's memory (`rig`) serve the same requests in turns, and
               what is noted is taken away between them. Conversations of a few turns, on pools that hold a part of them
    slices     the publisher's thread rests between slices (`marconi.events.publisher`): how long they are while so many
               blocks are published, and while a snapshot of them is made, and what that takes in all

Times are processor time of the thread, with the garbage collector off; of each request the least of the rounds counts,
so that whatever else the machine does meets both alike. Unpaced, a slice would be the interpreter's own 5 ms, and as
long as it takes where it is one call: encoding a whole snapshot.

    python benchmark/events.py [--requests N] [--rounds N] [--blocks N,N,...] [--json FILE]
"""

import argparse
import gc
import json
import logging
import math
import os
import platform
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.engine.launch.policies import PolicyChoice
from marconi.events import publisher
from marconi.events.codec import Encoder
from marconi.events.mirror import Mirror
from marconi.events.tree_log import KeptKv, KeptState, Tenant, TreeLog
from marconi.model import load
from marconi.policy.base import Costs
from marconi.policy.request import Request
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.pools import HostPools, marconi

RESULTS = Path(__file__).parent / "results"
SEED = 1
MODEL = "qwen3-next-80b-a3b"
BLOCK_TOKENS = 64
NODE_BLOCKS = 10
"""Of a span of the tree, with a state at its end."""
NUM_WARM_UPS = 20
PARTS = ("match_prefix", "plan_prefill", "checkpoint", "evict_for_alloc")
"""What a request asks of a cache."""


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Microseconds a request."""

    without_us: float
    with_us: float
    num_changes: float
    """That are noted for a request."""

    @property
    def ratio(self) -> float:
        """With events over without."""
        return self.with_us / self.without_us


@dataclass(frozen=True, slots=True)
class Slices:
    """Those of the publisher's thread, milliseconds of processor time."""

    total_ms: float
    num_slices: int
    median_ms: float
    p99_ms: float
    longest_ms: float

    @classmethod
    def of(cls, work: Callable[[], object]) -> "Slices":
        """Of `work`, which is paced; nobody rests."""
        marks = [time.thread_time()]
        real = publisher.time
        publisher.time = SimpleNamespace(  # type: ignore[assignment]
            perf_counter=time.perf_counter, sleep=lambda _: marks.append(time.thread_time())
        )
        try:
            work()
        finally:
            publisher.time = real  # type: ignore[assignment]
        marks.append(time.thread_time())
        slices = [1000 * (end - start) for start, end in pairwise(marks)]
        p99_ms = sorted(slices)[math.ceil(0.99 * len(slices)) - 1]
        return cls(sum(slices), len(slices), statistics.median(slices), p99_ms, max(slices))


def conversations(num_requests: int) -> Iterator[Request]:
    """Turns of 600 tokens of a few dozen conversations, the last 100 of them the answer, in random order."""
    rng = Random(SEED)  # noqa: S311 - a workload, not a secret
    held: list[array[int]] = [array("i") for _ in range(24)]
    for number in range(num_requests):
        which = rng.randrange(len(held))
        if len(held[which]) > 6_000:
            held[which] = array("i")
        held[which] += array("i", rng.choices(range(50_000), k=600))
        path = held[which].tobytes()
        yield Request(path, len(held[which]) - 100, 100, len(held[which]), float(number))


def served(num_requests: int, log: TreeLog | None) -> tuple[list[float], float]:
    """Seconds of each request in a new cache, and how many changes a request was noted with."""
    model, clock = load(MODEL), TraceClock()
    costs = Costs(model.kv_bytes_per_token, max(model.checkpoint_bytes, 1), model.prefix_flops)
    host = HostPools(30_000, 64, 12_000)
    cache = marconi(host, PolicyChoice("best"), costs, clock, log)
    replay = HostReplay(cache, host, 1, clock)
    spent_s = 0.0

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent_s
            start_s = time.thread_time()
            result = method(*args, **kwargs)
            spent_s += time.thread_time() - start_s
            return result

        return call

    for part in PARTS:
        setattr(cache, part, timed(getattr(cache, part)))
    seconds, num_changes = [], 0
    for number, request in enumerate(conversations(NUM_WARM_UPS + num_requests)):
        spent_s = 0.0
        replay.serve(request)
        if number >= NUM_WARM_UPS:
            seconds.append(spent_s)
            num_changes += 0 if log is None else len(log.changes)
        if log is not None:
            log.changes.clear()
    replay.check_invariants()
    return seconds, num_changes / num_requests


def measure_request(num_requests: int, rounds: int) -> RequestCost:
    """In turns; another begins each round."""
    least: dict[bool, list[float]] = {}
    num_changes = 0.0
    for number in range(rounds):
        for publishes in (number % 2 == 0, number % 2 == 1):
            seconds, num_logged = served(num_requests, TreeLog() if publishes else None)
            num_changes = max(num_changes, num_logged)
            least[publishes] = list(map(min, least.get(publishes, seconds), seconds))
    without_us, with_us = (1e6 * statistics.fmean(least[publishes]) for publishes in (False, True))
    return RequestCost(without_us, with_us, num_changes)


def measure_slices(num_blocks: int) -> dict[str, Slices]:
    """The slices of so many blocks, of a snapshot of them, and of one prompt of 100,000 tokens."""
    log, rng = TreeLog(), Random(SEED)  # noqa: S311 - a workload, not a secret
    mirror, encoder = Mirror(log, BLOCK_TOKENS, MODEL), Encoder(BLOCK_TOKENS)
    tokens = array("q", rng.choices(range(50_000), k=NODE_BLOCKS * BLOCK_TOKENS + 5))
    for serial in range(1, num_blocks // NODE_BLOCKS + 1):
        tokens[0] = serial
        log.changes += (KeptKv(serial, 0, tokens.tobytes(), Tenant()), KeptState(serial))
    rows = {f"{num_blocks:,} blocks published": Slices.of(lambda: list(publisher.paced(mirror.drain())))}
    rows[f"a snapshot of {num_blocks:,}"] = Slices.of(
        lambda: encoder.snapshot("worker", 1, 1, publisher.paced(mirror.held()), 0.0)
    )
    log.changes.append(KeptKv(0, -1, array("q", rng.choices(range(50_000), k=100_000)).tobytes(), Tenant()))
    rows[f"100,000 tokens beside {num_blocks:,}"] = Slices.of(lambda: list(publisher.paced(mirror.drain())))
    return rows


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description="What events cost the scheduler.")
    made.add_argument("--requests", type=int, default=400, metavar="N", help="timed ones of a round (default: 400)")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    made.add_argument("--blocks", type=sizes, default=[10_000, 100_000], metavar="N,N,...", help="10 or more each")
    made.add_argument("--json", type=Path, default=RESULTS / "events.json", metavar="FILE")
    return made


def sizes(text: str) -> list[int]:
    """Numbers of blocks; `ValueError` unless they make a span each."""
    found = [int(part) for part in text.split(",")]
    if min(found) < NODE_BLOCKS:
        raise ValueError
    return sorted(set(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit status 2 for bad input."""
    made = parser()
    args = made.parse_args(argv)
    for option, value in (("--requests", args.requests), ("--rounds", args.rounds)):
        if value < 1:
            made.error(f"{option} {value}: give 1 or more")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    console = Console()
    load_before = os.getloadavg()[0]
    gc.disable()
    try:
        with console.status("requests"):
            request = measure_request(args.requests, args.rounds)
        slices: dict[str, Slices] = {}
        for num_blocks in args.blocks:
            with console.status(f"{num_blocks:,} blocks"):
                slices |= measure_slices(num_blocks)
            gc.collect()
    finally:
        gc.enable()
    console.print(
        f"a request: {request.without_us:.0f} us without events, {request.with_us:.0f} us with, ratio "
        f"{request.ratio:.3f}, {request.num_changes:.1f} changes noted"
    )
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("slices", "p50 ms", "p99 ms", "max ms", "all ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, row in slices.items():
        times = (f"{each:.2f}" for each in (row.median_ms, row.p99_ms, row.longest_ms))
        table.add_row(name, f"{row.num_slices:,}", *times, f"{row.total_ms:.0f}")
    console.print(table)
    document = {
        "benchmark": "events",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": [load_before, os.getloadavg()[0]],
        "seed": SEED,
        "request": {**asdict(request), "ratio": request.ratio},
        "slices": {name: asdict(row) for name, row in slices.items()},
    }
    try:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"events.py: error: {error}", file=sys.stderr)
        return 2
    console.print(f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after; written to {args.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
