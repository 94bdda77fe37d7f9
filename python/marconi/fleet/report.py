"""The tables of a fleet's simulation: for each policy, memory and number of workers, a line a rule."""

from collections.abc import Sequence
from itertools import groupby

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from marconi.fleet.result import FleetReport, FleetRun
from marconi.replay.memory import format_bytes


def tables(report: FleetReport, timings: bool = False) -> RenderableType:
    """Every run of `report`; the simulation's own speed only with `timings`."""
    parts: list[RenderableType] = []
    for (policy, memory_bytes), runs in groupby(report.runs, key=lambda run: (run.policy, run.memory_bytes)):
        parts += [Text(_title(report, policy, memory_bytes), style="table.title"), _table(report, list(runs), timings)]
    return Group(*parts)


def _title(report: FleetReport, policy: str, memory_bytes: int) -> str:
    share = f" ({memory_bytes / report.unbounded_bytes:.3g}x of unbounded)" if report.unbounded_bytes else ""
    single = report.single(policy, memory_bytes)
    return (
        f"{report.trace}, {report.model} on {report.device}, {policy}, {format_bytes(memory_bytes)} in all{share}, "
        f"seed {report.seed}; one cache of it: hit rate {100 * single:.2f} %"
    )


def _table(report: FleetReport, runs: Sequence[FleetRun], timings: bool) -> Table:
    table = Table(box=SIMPLE)
    names = ["hit rate", "of one cache", "TTFT p50", "p95", "p99", f"> {runs[0].slo_s:g} s", "imbalance", "idle"]
    table.add_column("workers", justify="right", no_wrap=True)
    table.add_column("router", no_wrap=True)
    for name in [*names, *(["requests/s"] if timings else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        share = report.share_of_single(run)
        table.add_row(
            f"{run.num_replicas:,}",
            run.router,
            f"{100 * run.token_hit_rate:.2f} %",
            "-" if share is None else f"{share:.3f}",
            *(f"{seconds:.3g} s" for seconds in (run.ttft_s.p50, run.ttft_s.p95, run.ttft_s.p99)),
            f"{run.num_slo_violations:,}",
            f"{run.computed_imbalance:.2f}",
            f"{run.num_idle_workers:,}",
            *([f"{run.requests_per_s:,.0f}"] if timings else []),
        )
    return table
