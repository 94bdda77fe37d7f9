"""What online tuning costs the scheduler's thread: microseconds a finished request, with the tuner's process beside it.

A request costs a place in a queue, a look for decisions, and one observation of how long its prefill took. Hashing and
sending are another thread's, most of it without the GIL. Requests follow each other as fast as the process takes them.

    python benchmark/online_tuning.py [--num-requests N] [--model NAME] [--json FILE]

Times are the thread's own processor time: what else the machine does is no bookkeeping. The bar is 50 us a request.
"""

import argparse
import json
import os
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.engine.tuner import MAX_WAITING_TOKENS, OnlineTuner
from marconi.model import load
from marconi.model.learned_latency import LearnedLatency
from marconi.replay.online_tuner import Assignment
from marconi.tuning import Objective
from marconi.tuning.record import BLOCK_TOKENS

BAR_US = 50.0
LENGTHS = (1_000, 10_000, 30_000, 100_000)
SEED = 1


def measure(num_tokens: int, num_requests: int, model: str) -> dict[str, Any]:
    """Requests of one length, half of each a prefix that others have too."""
    profile = load(model)
    rng = np.random.default_rng(SEED)
    prefixes = rng.integers(150_000, size=(8, num_tokens // 2))
    requests = [
        array("q", np.append(prefixes[rng.integers(8)], rng.integers(150_000, size=num_tokens // 2)).tolist())
        for _ in range(num_requests)
    ]
    latency = LearnedLatency(profile.prefix_flops)
    tuner = OnlineTuner(
        Assignment(
            hf_config={},
            kv_bytes_per_token=profile.kv_bytes_per_token,
            state_bytes=profile.checkpoint_bytes,
            num_tokens=20 * num_tokens,
            num_slots=100,
            chunk_tokens=8192,
            num_working_slots=3,
            block_tokens=BLOCK_TOKENS,
            max_ghost_tokens=10_000_000,
            objective=Objective.TOKEN_HIT_RATE,
            ttft_budget_s=0.0,
        )
    )
    times_us = []
    try:
        for index, token_ids in enumerate(requests):
            start = time.thread_time()
            latency.observe(num_tokens // 2, num_tokens, 0.1)
            tuner.observe(token_ids, num_tokens - 100, 0, float(index), (latency.overhead_s, latency.s_per_flop))
            tuner.poll()
            times_us.append(1e6 * (time.thread_time() - start))
            while tuner.num_waiting_tokens > MAX_WAITING_TOKENS // 2:
                time.sleep(0.001)
    finally:
        tuner.close()
    rising = sorted(times_us)
    return {
        "num_tokens": num_tokens,
        "num_requests": num_requests,
        "mean_us": sum(rising) / len(rising),
        "median_us": rising[len(rising) // 2],
        "p99_us": rising[-(-99 * len(rising) // 100) - 1],
        "records_dropped": tuner.counts.num_records_dropped,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit status 2 for bad input. Whether the bar holds is for the reader."""
    parser = argparse.ArgumentParser(description="What online tuning costs the scheduler's thread.")
    parser.add_argument("--num-requests", type=int, default=1000, metavar="N", help="of each length (default: 1000)")
    parser.add_argument("--model", default="qwen3-next-80b-a3b", metavar="NAME", help="default: qwen3-next-80b-a3b")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    if args.num_requests < 1:
        print(f"online_tuning.py: error: --num-requests must be 1 or more, got {args.num_requests}", file=sys.stderr)
        return 2
    try:
        rows = [measure(num_tokens, args.num_requests, args.model) for num_tokens in LENGTHS]
        if args.json is not None:
            document = {"benchmark": "online_tuning", "bar_us": BAR_US, "cores": os.cpu_count(), "rows": rows}
            args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"online_tuning.py: error: {error}", file=sys.stderr)
        return 2
    table = Table("tokens", "mean us", "median us", "P99 us", "dropped", "bar", box=SIMPLE)
    for row in rows:
        verdict = "holds" if row["mean_us"] <= BAR_US else "missed"
        times = (f"{row[name]:.1f}" for name in ("mean_us", "median_us", "p99_us"))
        table.add_row(f"{row['num_tokens']:,}", *times, f"{row['records_dropped']:,}", verdict)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
