"""A server with this project's cache against stock SGLang on recorded traces, at equal bytes and at equal pools.

For each trace, model and amount of memory (a share of what an unbounded cache holds at the end of the reporting half),
the reporting half is served one request after the other by

    stock      SGLang's admission and LRU, its default flags and its default split of bytes (0.9)
    equal      this project's, in the same two pools: as many KV tokens and as many slots
    planned    this project's, in as many bytes, as `marconi plan` advises for the *tuning* half: divided at a ratio, or
               in one pool (`--enable-unified-memory`)
    bound      what no rule hits more than in the same two pools (`replay/most_hit.py`)

Replays are `marconi.replay.server`, whose hits agree with the real cache classes request for request:
`test/engine/test_host_replay.py`.

    python benchmark/server_bars.py TRACE... [--session-rate R] [--model NAME]... [--memory X]... [--ratio R|joint]
                                    [--drafts] [--num-requests N] [--processes N] [--json FILE]

`--ratio` divides by this, or takes one pool (`joint`), instead of planning, which takes most of the time. With
`--drafts` a head drafts on all servers: KV of one more attention layer, and each request keeps the slots in which
SGLang tracks states.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.engine.launch.policies import PolicyChoice, hybrid_cache
from marconi.model import DEVICES, ModelProfile, PrefillLatency, load
from marconi.plan.plan import make_plan
from marconi.policy.base import Costs, Need
from marconi.policy.catalog import SGLANG_MAMBA_RATIO
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Trace
from marconi.replay.admission.chunk_end import ExtraBuffer
from marconi.replay.inputs import GENERATE
from marconi.replay.most_hit import Limit, most_hit_tokens
from marconi.replay.pools import JointPool, Pool, TwoPools
from marconi.replay.reuse import Reuse
from marconi.replay.scheduling import NUM_TRACKING_SLOTS, Scheduling
from marconi.replay.server import ServerReplay
from marconi.replay.task import ReplayInputs, unbounded_bytes
from marconi.replay.trace import Demand, Half, ReadOptions, generate, preset, read
from marconi.replay.trace.arrivals import SESSION_RATE
from marconi.replay.trace.base import UnusedOption
from marconi.tree import RadixTree

MODELS = ("qwen3-next-80b-a3b", "nemotron-h-8b")
MEMORIES = (0.02, 0.05, 0.1, 0.2)
ONE_POOL = "joint"
NUM_DRAWN_SESSIONS = 600
_SEEDS = {Half.ALL: 0, Half.REPORTING: 0, Half.TUNING: 1}
"""Of what is drawn: each half has sessions of its own."""
GRID_TOKENS, INTERVAL_TOKENS = 64, 256
TWO_POOLS = frozenset({Need.KV, Need.STATE})
STOCK, OURS, BOUND = "stock", "ours", "bound"


@dataclass(frozen=True, slots=True)
class Input:
    """A trace and how it is read."""

    path: str
    session_rate: float | None
    num_requests: int | None
    shown: Half = Half.REPORTING
    """The half whose figures are reported."""

    def half(self, half: Half) -> Trace:
        """One of its halves."""
        return _read(self, half)


@cache
def _read(given: Input, half: Half) -> Trace:
    if given.path.startswith(GENERATE):
        rate = SESSION_RATE if given.session_rate is None else given.session_rate
        demand = Demand(NUM_DRAWN_SESSIONS, rate, seed=_SEEDS[half])
        whole = generate(preset(given.path.removeprefix(GENERATE)), demand)
    else:
        try:
            whole = read(given.path, ReadOptions(session_rate=given.session_rate, half=half))
        except UnusedOption:
            whole = read(given.path, ReadOptions(half=half))
    return Trace(whole.name, whole.unit_tokens, whole.requests[: given.num_requests])


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pool: two pools, or one."""

    kv_tokens: int = 0
    state_slots: int = 0
    num_bytes: int | None = None
    """Of the one pool."""


@dataclass(frozen=True, slots=True)
class Job:
    """One replay."""

    kind: str
    """`STOCK`, `OURS` or `BOUND`."""
    given: Input
    model: str
    sizes: Sizes
    drafts: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it."""

    recomputed_tokens: int
    states_written: int
    too_large: int


def run(job: Job) -> Result:
    """Replay; a pure function of `job`."""
    trace, model = job.given.half(job.given.shown), load(job.model)
    unit, costs = trace.unit_tokens, Costs(_kv_bytes(model, job.drafts), model.checkpoint_bytes, model.prefix_flops)

    num_prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests)
    if job.kind == BOUND:
        for_kv = Limit(job.sizes.kv_tokens * costs.kv_bytes_per_token, costs.kv_bytes_per_token, 0)
        for_states = Limit(job.sizes.state_slots * costs.state_bytes, 0, costs.state_bytes)
        return Result(num_prompt_tokens - most_hit_tokens(Reuse.of(trace), (for_kv, for_states)), 0, 0)
    server = _stock(job, unit) if job.kind == STOCK else _ours(job, unit, costs)
    num_hit_tokens = sum(server.serve(request) for request in trace.requests)
    counters = server.counters
    return Result(num_prompt_tokens - num_hit_tokens, counters.num_states_written, counters.num_too_large)


def _kv_bytes(model: ModelProfile, drafts: bool) -> int:
    """KV of a token, with that of a draft head, which is one layer of full attention."""
    num_layers = sum(each.num_layers for each in model.kinds if each.kv_bytes_per_token)
    return model.kv_bytes_per_token // num_layers * (num_layers + drafts)


def _stock(job: Job, unit: int) -> ServerReplay:
    admission = ExtraBuffer(grid_tokens=max(GRID_TOKENS, unit), interval_tokens=max(INTERVAL_TOKENS, unit))
    hybrid = HybridCache(RadixTree(unit), admission, Order(SeparateLru(TWO_POOLS)))
    pools = TwoPools(job.sizes.kv_tokens, job.sizes.state_slots)
    return ServerReplay(hybrid, pools, Scheduling.of(admission, unit))


def _ours(job: Job, unit: int, costs: Costs) -> ServerReplay:
    sizes = job.sizes
    memory: Pool = (
        TwoPools(sizes.kv_tokens, sizes.state_slots)
        if sizes.num_bytes is None
        else JointPool(sizes.num_bytes, costs.kv_bytes_per_token, costs.state_bytes, unit)
    )
    needs = frozenset({memory.kv_need, memory.state_need})
    tree = hybrid_cache(PolicyChoice("best"), costs, unit, 1, None, needs=needs)
    scheduling = Scheduling.of(tree.admission, unit)
    if job.drafts:
        scheduling = replace(scheduling, num_working_slots=1 + NUM_TRACKING_SLOTS, num_lent_slots=0)
    return ServerReplay(tree, memory, scheduling)


def sizes_of(num_bytes: int, ratio: float | None, model_name: str, unit: int, drafts: bool = False) -> Sizes:
    """So many bytes, divided at `ratio`; one pool without it."""
    if ratio is None:
        return Sizes(num_bytes=num_bytes)
    model = load(model_name)
    state_bytes = num_bytes * ratio / (1 + ratio)
    kv_tokens = int((num_bytes - state_bytes) / _kv_bytes(model, drafts)) // unit * unit
    return Sizes(kv_tokens, int(state_bytes / model.checkpoint_bytes))


def measure(given: Input, model: str, args: argparse.Namespace, workers: ProcessPoolExecutor) -> list[dict[str, Any]]:
    """A row for each amount of memory."""
    device = DEVICES["h100"]
    inputs_of = {
        half: ReplayInputs(given.half(half), load(model), device, PrefillLatency(load(model), device))
        for half in (Half.TUNING, Half.REPORTING)
    }
    unit = inputs_of[Half.REPORTING].trace.unit_tokens
    whole = unbounded_bytes(inputs_of[Half.REPORTING])
    memories = [int(share * whole) for share in args.memory]
    if args.ratio is None:
        advice = make_plan(inputs_of[Half.TUNING], memories, None, args.processes).advice
        ratios = [each.best.task.mamba_ratio for each in advice if each.best is not None]
    else:
        ratios = [None if args.ratio == ONE_POOL else float(args.ratio)] * len(memories)
    rows = []
    for share, num_bytes, ratio in zip(args.memory, memories, ratios, strict=True):
        same, planned = (sizes_of(num_bytes, each, model, unit, args.drafts) for each in (SGLANG_MAMBA_RATIO, ratio))
        kinds = [(STOCK, same), (OURS, same), (BOUND, same), (OURS, planned)]
        futures = [workers.submit(run, Job(kind, given, model, sizes, args.drafts)) for kind, sizes in kinds]
        rows.append((share, num_bytes, ratio, same, planned, futures))
    return [row(given, model, *each) for each in rows]


def row(
    given: Input,
    model: str,
    share: float,
    num_bytes: int,
    ratio: float | None,
    same: Sizes,
    planned: Sizes,
    futures: Sequence[Any],
) -> dict[str, Any]:
    """The figures of one amount of memory."""
    stock, equal, bounded, plan = (future.result() for future in futures)
    num_requests = len(given.half(Half.REPORTING).requests)
    bound = bounded.recomputed_tokens
    gap = stock.recomputed_tokens - bound
    return {
        "trace": Path(given.path).name,
        "model": model,
        "memory": share,
        "memory_bytes": num_bytes,
        "requests": num_requests,
        "kv_tokens": same.kv_tokens,
        "state_slots": same.state_slots,
        "planned_ratio": ratio,
        "planned_kv_tokens": planned.kv_tokens if planned.num_bytes is None else None,
        "planned_state_slots": planned.state_slots if planned.num_bytes is None else None,
        "stock": asdict(stock),
        "equal": asdict(equal),
        "planned": asdict(plan),
        "bound_recomputed_tokens": bound,
        "equal_over_stock": equal.recomputed_tokens / stock.recomputed_tokens,
        "planned_over_stock": plan.recomputed_tokens / stock.recomputed_tokens,
        "gap_closed": (stock.recomputed_tokens - equal.recomputed_tokens) / gap if gap > 0 else None,
        "states_over_stock": equal.states_written / max(stock.states_written, 1),
    }


def mean_of_logs(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def render(rows: Sequence[dict[str, Any]]) -> Table:
    """A line an amount of memory, and one for all."""
    heads = ("trace", "model", "memory", "recomputed", "equal pools", "gap closed", "ratio", "equal bytes", "states")
    table = Table(*heads, box=SIMPLE, caption="recomputed: stock, in millions of tokens; the rest over stock")
    for each in rows:
        table.add_row(
            each["trace"].split(".")[0],
            each["model"],
            f"{each['memory']:g}",
            f"{each['stock']['recomputed_tokens'] / 1e6:.1f}",
            f"{each['equal_over_stock']:.3f}",
            "" if each["gap_closed"] is None else f"{each['gap_closed']:.0%}",
            ONE_POOL if each["planned_ratio"] is None else f"{each['planned_ratio']:g}",
            f"{each['planned_over_stock']:.3f}",
            f"{each['states_over_stock']:.2f}",
        )
    total = summary(rows)
    gap, states = total["gap_closed_mean"], total["states_mean"]
    table.add_section()
    table.add_row(
        *("all", "", "", "", f"{total['equal_mean']:.3f}", "" if gap is None else f"{gap:.0%}", ""),
        *(f"{total['planned_mean']:.3f}", f"{states:.2f}"),
    )
    return table


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Over all rows: geometric means, worst cases, and the mean of the gaps closed."""
    gaps = [each["gap_closed"] for each in rows if each["gap_closed"] is not None]
    return {
        "equal_mean": mean_of_logs([each["equal_over_stock"] for each in rows]),
        "equal_worst": max(each["equal_over_stock"] for each in rows),
        "planned_mean": mean_of_logs([each["planned_over_stock"] for each in rows]),
        "planned_worst": max(each["planned_over_stock"] for each in rows),
        "gap_closed_mean": sum(gaps) / len(gaps) if gaps else None,
        "states_mean": mean_of_logs([each["states_over_stock"] for each in rows]),
        "states_worst": max(each["states_over_stock"] for each in rows),
    }


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description="A server's cache against stock SGLang's on recorded traces.")
    made.add_argument("traces", nargs="+", metavar="TRACE")
    made.add_argument("--session-rate", type=float, metavar="R", help="sessions a second, where a trace says none")
    made.add_argument("--model", action="append", metavar="NAME", help=f"default: {' and '.join(MODELS)}")
    made.add_argument("--memory", action="append", type=float, metavar="X", help="default: 0.02, 0.05, 0.1, 0.2")
    made.add_argument(
        "--ratio", metavar="R", help=f"bytes of states over bytes of KV, or {ONE_POOL} for one pool; instead of a plan"
    )
    made.add_argument("--drafts", action="store_true", help="a head drafts, and its KV counts")
    made.add_argument("--num-requests", type=int, metavar="N", help="the first so many of each half; default: all")
    made.add_argument("--processes", type=int, default=2, metavar="N", help="default: 2")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return made


def check(args: argparse.Namespace) -> None:
    """Raise `ValueError` for a number that nothing can be made of."""
    for option, given in (("--memory", args.memory), ("--ratio", [args.ratio])):
        for value in given:
            if value not in (None, ONE_POOL) and not _is_positive(value):
                raise ValueError(f"{option} must be a number above 0, got {value}")
    for option, count in (("--num-requests", args.num_requests), ("--processes", args.processes)):
        if count is not None and count < 1:
            raise ValueError(f"{option} must be 1 or more, got {count}")


def _is_positive(number: float | str) -> bool:
    try:
        return 0 < float(number) < math.inf
    except ValueError:
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print and write; exit status 2 for bad input."""
    args = parser().parse_args(argv)
    args.memory, args.model = args.memory or list(MEMORIES), args.model or list(MODELS)
    rows: list[dict[str, Any]] = []
    try:
        check(args)
        with ProcessPoolExecutor(args.processes) as workers:
            for path in args.traces:
                for model in args.model:
                    rows += measure(Input(path, args.session_rate, args.num_requests), model, args, workers)
                    print(f"{Path(path).name}, {model}: done", file=sys.stderr)
        Console(width=120).print(render(rows))
        if args.json is not None:
            document = {
                "benchmark": "server_bars",
                "session_rate": args.session_rate,
                "drafts": args.drafts,
                "summary": summary(rows),
                "rows": rows,
            }
            args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"server_bars.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
