"""Which division of memory between KV and states suits which traffic, and what a wrong one costs.

For each trace or drawn workload, model and amount of memory (a share of what an unbounded cache holds at the end),
stock SGLang at its own ratio and this project's default at each ratio and in one pool serve the same requests in the
same bytes, one after the other (`server_bars.py`). Figures are recomputed tokens over stock's. The *regret* of a
division is what it recomputes more than the best of the row, in stock's tokens; *of ratios*, more than the best ratio,
for servers that cannot have one pool. Halves of a drawn workload are sessions of two seeds.

    python benchmark/split.py TRACE|generate:WORKLOAD... [--half tuning|reporting] [--session-rate R] [--model NAME]...
                              [--memory X]... [--processes N] [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.model import DEVICES, PrefillLatency, load
from marconi.policy.catalog import SGLANG_MAMBA_RATIO
from marconi.replay.task import ReplayInputs, unbounded_bytes
from marconi.replay.trace import Half
from server_bars import MEMORIES, MODELS, Input, Job, mean_of_logs, run, sizes_of

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.9, 1.5, None)
"""None is one pool, the last."""


@dataclass(frozen=True, slots=True)
class Row:
    """One trace, model and amount of memory."""

    trace: str
    model: str
    memory: float
    num_bytes: int
    stock_tokens: int
    """Recomputed by stock."""
    over_stock: tuple[float, ...]
    """Recomputed tokens over stock's, by the order of `RATIOS`."""

    @property
    def regrets(self) -> tuple[float, ...]:
        """Tokens recomputed beyond the best division's, over stock's, by the order of `RATIOS`."""
        best = min(self.over_stock)
        return tuple(each - best for each in self.over_stock)

    @property
    def regrets_of_ratios(self) -> tuple[float, ...]:
        """As above, by the best ratio, for all but one pool."""
        *ratios, _ = self.over_stock
        best = min(ratios)
        return tuple(each - best for each in ratios)


def measure(given: Input, model: str, memories: Sequence[float], workers: ProcessPoolExecutor) -> list[Row]:
    """A row for each amount of memory."""
    trace, profile, device = given.half(given.shown), load(model), DEVICES["h100"]
    whole = unbounded_bytes(ReplayInputs(trace, profile, device, PrefillLatency(profile, device)))
    rows = []
    for share in memories:
        num_bytes = int(share * whole)
        kinds = [("stock", SGLANG_MAMBA_RATIO), *(("ours", ratio) for ratio in RATIOS)]
        jobs = [
            workers.submit(run, Job(kind, given, model, sizes_of(num_bytes, ratio, model, trace.unit_tokens)))
            for kind, ratio in kinds
        ]
        stock, *ours = (job.result().recomputed_tokens for job in jobs)
        rows.append(Row(trace.name, model, share, num_bytes, stock, tuple(each / stock for each in ours)))
    return rows


def render(rows: Sequence[Row]) -> Table:
    """A line an amount of memory, and four for all."""
    heads = ("one pool" if ratio is None else f"{ratio:g}" for ratio in RATIOS)
    table = Table("trace", "model", "memory", *heads, box=SIMPLE, caption="recomputed tokens over stock SGLang's")
    for row in rows:
        table.add_row(row.trace, row.model, f"{row.memory:g}", *(f"{each:.3f}" for each in row.over_stock))
    table.add_section()
    for name, values in summary(rows).items():
        shown = [f"{each:.3f}" for each in values]
        table.add_row(name.replace("_", " "), "", "", *shown, *[""] * (len(RATIOS) - len(shown)))
    return table


def summary(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Over all rows, of each of `RATIOS`: the geometric mean, the worst, and the mean regrets."""
    columns = list(zip(*(row.over_stock for row in rows), strict=True))
    regrets = zip(*(row.regrets for row in rows), strict=True)
    of_ratios = zip(*(row.regrets_of_ratios for row in rows), strict=True)
    return {
        "geometric_mean": [mean_of_logs(column) for column in columns],
        "worst": [max(column) for column in columns],
        "mean_regret": [sum(column) / len(column) for column in regrets],
        "mean_regret_of_ratios": [sum(column) / len(column) for column in of_ratios],
    }


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    made = argparse.ArgumentParser(description="Which division of memory suits which traffic.")
    made.add_argument("traces", nargs="+", metavar="TRACE", help="a trace, or generate:WORKLOAD")
    made.add_argument("--half", type=Half, default=Half.REPORTING, choices=list(Half), help="default: reporting")
    made.add_argument("--session-rate", type=float, metavar="R", help="sessions a second, where a trace says none")
    made.add_argument("--model", action="append", metavar="NAME", help=f"default: {' and '.join(MODELS)}")
    made.add_argument("--memory", action="append", type=float, metavar="X", help="default: 0.02, 0.05, 0.1, 0.2")
    made.add_argument("--num-requests", type=int, metavar="N", help="the first so many; default: all")
    made.add_argument("--processes", type=int, default=2, metavar="N", help="default: 2")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Replay, print and write; exit status 2 for bad input."""
    args = parser().parse_args(argv)
    rows: list[Row] = []
    try:
        with ProcessPoolExecutor(args.processes) as workers:
            for path in args.traces:
                for model in args.model or MODELS:
                    given = Input(path, args.session_rate, args.num_requests, args.half)
                    rows += measure(given, model, args.memory or MEMORIES, workers)
                    print(f"{path}, {model}: done", file=sys.stderr)
        Console(width=140).print(render(rows))
        if args.json is not None:
            document = {"benchmark": "split", "ratios": RATIOS, "summary": summary(rows), "rows": list(map(dump, rows))}
            args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"split.py: error: {error}", file=sys.stderr)
        return 2
    return 0


def dump(row: Row) -> dict[str, object]:
    """Convert to JSON."""
    return {
        "trace": row.trace,
        "model": row.model,
        "memory": row.memory,
        "memory_bytes": row.num_bytes,
        "stock_recomputed_tokens": row.stock_tokens,
        "over_stock": row.over_stock,
        "regrets": row.regrets,
    }


if __name__ == "__main__":
    sys.exit(main())
