"""What explaining a request costs the thread that serves it, and how exact it is, on generated conversations.

Requests of agents are served one after the other from the cache of a server, in the memory of a share of what all of
them would take, with prompts of some 10,000 to 60,000 tokens. Timed is all that a request pays for its explanation:
that `HybridCache.begin` asks `Misses.explain` and notes the misses to be counted (`Counters.missed`), and that the
server remembers the request for whoever asks (`Explanations.note`). Every 256 requests, one of them pays for counting
all of them and adding up their seconds (`max`). Two rows:

    one name space           all requests share prefixes
    two name spaces          every second session is in another name space

Beside them, paid by few: `eviction` is what an eviction takes to note why a state is gone and what was kept instead, so
as often as states are evicted; `answer` is the explanation as JSON for a request that asks.

With `--whole` a whole request is timed instead, match to end, by four servers in turn: `--marconi-explain on`, where
each request is noted and asks for its explanation, so its steps are recorded as the engine does
(`engine/reports/moments.py`); the same where none asks; and two under `off`, which do none of this. What the two that
do the same differ by is noise.

Everything is served `NUM_RUNS` times, in the same order and with the same answers, and each time that is shown is the
median over the runs: a machine that interrupts the thread for something else does so elsewhere in each of them.

    python benchmark/explain_cost.py [--num-sessions N] [--memory SHARE] [--check] [--whole] [--json FILE]

Exit status 1, with `--check`: the 99th percentile of a row of requests takes longer than `MAX_US`.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple, ParamSpec, TypeVar
from unittest import mock

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.engine.reports.explain import Explained, Explanations, dumps
from marconi.engine.reports.moments import Moments, Steps
from marconi.engine.reports.trail import Trail
from marconi.model import PrefillLatency, load
from marconi.model.device import device
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.base import Costs
from marconi.policy.catalog import PolicySpec
from marconi.policy.counters import Counters
from marconi.policy.misses import Explanation, kept_instead
from marconi.policy.request import Lease, Request
from marconi.replay.catalog import build
from marconi.replay.result import nearest_rank, write
from marconi.replay.server import ServerReplay
from marconi.replay.task import ReplayInputs, Task, unbounded_bytes
from marconi.replay.trace import Demand, generate, preset
from marconi.tree.node import ID_BYTES

MAX_US = 30.0
NUM_RUNS = 5
REQUEST_ROWS = ("one name space", "two name spaces")
WHOLE_ROWS = ("on", "on, no steps", "off", "off again")
_NUM_ON = 2
_WORKLOAD, _MODEL = "agent-append", "qwen3-next-80b-a3b"
_PERCENTS = (50, 95, 99)
_P = ParamSpec("_P")
_R = TypeVar("_R")


class Timer:
    """Seconds, one entry for each request or eviction."""

    def __init__(self) -> None:
        self.took_s: list[float] = []

    def begin(self) -> None:
        """The next entry begins."""
        self.took_s.append(0.0)

    def timed(self, function: Callable[_P, _R], *, is_entry: bool = False) -> Callable[_P, _R]:
        """The same function, whose time is added to the latest entry, or is one."""

        def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if is_entry:
                self.begin()
            start_s = time.perf_counter()
            result = function(*args, **kwargs)
            self.took_s[-1] += time.perf_counter() - start_s
            return result

        return called


class Server:
    """A cache that serves, and remembers its latest requests as the engine does, with a timer on each explanation."""

    def __init__(self, cache: ServerReplay, costs: Costs) -> None:
        self.cache = cache
        self.requests, self.answers = Timer(), Timer()
        latency = LearnedLatency(costs.flops)
        latency.follow(0.01, 1e-15)
        self._explanations = Explanations(latency, costs.flops)
        self._moments = Moments(lambda: 0.0)

    def serve(self, requests: Sequence[Request]) -> int:
        """Serve all; returns the hit tokens."""
        hybrid = self.cache.hybrid
        begin = hybrid.begin
        explain = self.requests.timed(hybrid.misses.explain)

        def of_prompt(lease: Lease, grid_tokens: int) -> Explanation:
            """A server has packed the prompt's ids, and knows no answer yet."""
            request = lease.request
            path = request.path[: request.num_prompt_tokens * ID_BYTES]
            return explain(Lease(replace(request, path=path), lease.match), grid_tokens)

        hybrid.misses.explain = of_prompt  # type: ignore[method-assign]
        note, dump = self.requests.timed(self._note), self.answers.timed(dumps, is_entry=True)

        def begun(lease: Lease, now_s: float, grid_tokens: int | None = None) -> Explanation:
            self.requests.begin()
            explanation = begin(lease, now_s, grid_tokens)
            assert explanation is not None
            explained = note(lease, explanation, now_s)
            dump(explained, self._steps(lease))
            return explanation

        hybrid.begin = begun  # type: ignore[method-assign]
        with mock.patch.object(Counters, "missed", self.requests.timed(Counters.missed)):
            return sum(map(self.cache.serve, requests))

    def explain(self, *, records_steps: bool) -> None:
        """From now on note each request that begins, and record its steps, as the engine does."""
        begin = self.cache.hybrid.begin

        def begun(lease: Lease, now_s: float, grid_tokens: int | None = None) -> Explanation:
            explanation = begin(lease, now_s, grid_tokens)
            assert explanation is not None
            self._note(lease, explanation, now_s)
            if records_steps:
                self._steps(lease)
            return explanation

        self.cache.hybrid.begin = begun  # type: ignore[method-assign]

    def _note(self, lease: Lease, explanation: Explanation, now_s: float) -> Explained:
        trail = Trail(lease.request.namespace, lease.match.checkpoint)
        explained = Explained("d8f0c1d5e6b34f5b9d3f", now_s, explanation, trail, None)
        self._explanations.note(explained)
        return explained

    def _steps(self, lease: Lease) -> Steps:
        now = self._moments.now
        steps = Steps(queued=now(), unqueued=now(), matched=now(), began=now())
        for end in range(lease.match.checkpoint.depth, lease.request.num_prompt_tokens, 8192):
            steps.computes(end, now())
            steps.computed(now())
        steps.ended = now()
        return steps


class Measured(NamedTuple):
    """Microseconds of the thread by row, an entry a request or eviction, and the first row's prompts and misses."""

    us_of_row: dict[str, list[float]]
    num_prompt_tokens: int
    num_missed_tokens: int


def _inputs(num_sessions: int, share: float) -> tuple[ReplayInputs, Callable[[], ServerReplay]]:
    """The requests, and what makes a cache for them."""
    model = load(_MODEL)
    trace = generate(preset(_WORKLOAD), Demand(num_sessions=num_sessions, session_rate=1.0, seed=0), 1)
    inputs = ReplayInputs(trace, model, device("h100"), PrefillLatency(model, device("h100")))
    task = Task(PolicySpec("best"), int(share * unbounded_bytes(inputs)))

    def cache() -> ServerReplay:
        made = build(task.policy, task.config(inputs))
        assert isinstance(made, ServerReplay)
        return made

    return inputs, cache


def whole(num_sessions: int, share: float) -> dict[str, list[float]]:
    """Microseconds of each whole request, by `--marconi-explain`."""
    inputs, cache = _inputs(num_sessions, share)
    servers = {name: Server(cache(), inputs.costs) for name in WHOLE_ROWS}
    for name in WHOLE_ROWS[:_NUM_ON]:
        servers[name].explain(records_steps=name == WHOLE_ROWS[0])
    caches = {name: server.cache for name, server in servers.items()}
    for name in WHOLE_ROWS[_NUM_ON:]:
        caches[name].hybrid.misses = None
    us_of_row: dict[str, list[float]] = {name: [] for name in WHOLE_ROWS}
    for number, request in enumerate(inputs.trace.requests):
        # Who comes first finds the request's own data in no cache of the processor.
        turn = number % len(WHOLE_ROWS)
        for name in (*WHOLE_ROWS[turn:], *WHOLE_ROWS[:turn]):
            start_s = time.perf_counter()
            caches[name].serve(request)
            us_of_row[name].append(1e6 * (time.perf_counter() - start_s))
    assert len({each.counters.num_hit_tokens for each in caches.values()}) == 1, "explaining changes no hit"
    return us_of_row


def measured(num_sessions: int, share: float) -> Measured:
    """Serve the requests of every row."""
    inputs, cache = _inputs(num_sessions, share)
    trace = inputs.trace

    def server() -> Server:
        return Server(cache(), inputs.costs)

    first, second, evictions = server(), server(), Timer()
    timed = evictions.timed(kept_instead, is_entry=True)
    with mock.patch("marconi.policy.hybrid_cache.kept_instead", timed):
        num_hit_tokens = first.serve(trace.requests)
    num_prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests)
    num_missed_tokens = sum(first.cache.counters.num_missed_tokens.values())
    assert num_hit_tokens + num_missed_tokens == num_prompt_tokens, "every token is cached or missed for one cause"
    second.serve([replace(request, namespace=request.session % 2) for request in trace.requests])
    timers = (first.requests, second.requests, evictions, first.answers)
    names = (*REQUEST_ROWS, "eviction", "answer")
    us_of_row = {name: [1e6 * each for each in timer.took_s] for name, timer in zip(names, timers, strict=True)}
    return Measured(us_of_row, num_prompt_tokens, num_missed_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description="What explaining a request costs the thread that serves it.")
    parser.add_argument("--num-sessions", type=int, default=60, metavar="N", help="default: 60")
    parser.add_argument("--memory", type=float, default=0.1, metavar="SHARE", help="of all they take (default: 0.1)")
    parser.add_argument("--check", action="store_true", help=f"fail beyond {MAX_US:g} microseconds")
    parser.add_argument("--whole", action="store_true", help="time whole requests, with and without")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    args = parser.parse_args(argv)
    if args.whole and args.check:
        parser.error("--whole: there is no bar for whole requests: leave --check out")
    console, remark = Console(), ""
    if args.whole:
        runs = [whole(args.num_sessions, args.memory) for _ in range(NUM_RUNS)]
    else:
        made = [measured(args.num_sessions, args.memory) for _ in range(NUM_RUNS)]
        runs = [each.us_of_row for each in made]
        _, num_prompt_tokens, num_missed_tokens = made[0]
        remark = f"{num_missed_tokens:,} of {num_prompt_tokens:,} prompt tokens missed in {REQUEST_ROWS[0]}"
    table = Table(box=SIMPLE, title=f"{'a whole request' if args.whole else 'explaining a request'}, microseconds")
    table.add_column("")
    for name in ("times", "mean", *(f"p{percent}" for percent in _PERCENTS), "max"):
        table.add_column(name, justify="right")
    rows = {}
    for name in runs[0]:
        took_us = sorted(map(median, zip(*(run[name] for run in runs), strict=True)))
        at_us = {"mean": fmean(took_us), **{f"p{percent}": nearest_rank(took_us, percent) for percent in _PERCENTS}}
        at_us["max"] = took_us[-1]
        rows[name] = {"num": len(took_us), **at_us}
        table.add_row(name, f"{len(took_us):,}", *(f"{each:.1f}" for each in at_us.values()))
    console.print(table)
    console.print(remark)
    if args.json is not None:
        write(args.json, {"microseconds": rows})
    return int(args.check and any(rows[name]["p99"] > MAX_US for name in REQUEST_ROWS))


if __name__ == "__main__":
    sys.exit(main())
