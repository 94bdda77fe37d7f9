"""The table of a report: one for each amount of memory, a line a policy.

Below it, where there are block caches, a second one with the numbers of the Mooncake-format block replays: by their
names and without separators, for comparison with what other such replays print.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.table import Table

from marconi.policy.block.replay import BlockReplay
from marconi.replay.memory import format_bytes
from marconi.replay.result import Report, Run

TABLE_WIDTH = 150
"""Columns where the output is no terminal."""


def console_for_tables() -> Console:
    """Stdout, wide enough for a table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=TABLE_WIDTH)


def tables(report: Report, timings: bool = False) -> RenderableType:
    """Every run of `report`; the replay's own speed only with `timings`."""
    by_memory = groupby(report.runs, key=lambda run: run.memory_bytes)
    return Group(*(table for memory, runs in by_memory for table in _tables(report, memory, list(runs), timings)))


def _tables(report: Report, memory_bytes: int, runs: Sequence[Run], timings: bool) -> Iterator[Table]:
    yield _table(report, memory_bytes, runs, timings)
    replays = [(run.policy, replayed) for run in runs if (replayed := run.block_replay) is not None]
    if replays:
        yield _block_table(replays)


def _table(report: Report, memory_bytes: int, runs: Sequence[Run], timings: bool) -> Table:
    table = Table(box=SIMPLE, title=_title(report, memory_bytes), title_justify="left")
    table.add_column("policy")
    for name in ("hit rate", "FLOPs saved", "TTFT p50", "p95", "p99"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in (f"> {runs[0].slo_s:g} s", "states kept", "states hit", "evictions", "too large"):
        table.add_column(name, justify="right")
    if timings:
        table.add_column("requests/s", justify="right")
    for run in runs:
        table.add_row(*_cells(run), *([f"{run.requests_per_s:,.0f}"] if timings else []))
    return table


def _block_table(replays: Sequence[tuple[str, BlockReplay]]) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("policy")
    for field in fields(BlockReplay):
        table.add_column(field.name, justify="right", overflow="fold")
    for policy, replayed in replays:
        table.add_row(
            policy,
            f"{replayed.overall_hit_rate:.6f}",
            str(replayed.total_hit_tokens),
            str(replayed.total_prompt_tokens),
            str(replayed.final_cache_blocks),
        )
    return table


def _title(report: Report, memory_bytes: int) -> str:
    share = f" ({memory_bytes / report.unbounded_bytes:.3g}x of unbounded)" if report.unbounded_bytes else ""
    return (
        f"{report.trace}, {report.model} on {report.device}, {format_bytes(memory_bytes)}{share}, "
        f"{report.mode}, seed {report.seed}"
    )


def _cells(run: Run) -> tuple[str, ...]:
    evictions = ", ".join(f"{count:,} {reason}" for reason, count in run.num_evictions if count)
    policy = run.policy if run.chosen is None else f"{run.policy} ({run.chosen})"
    if run.mamba_full_memory_ratio is not None:
        policy += f", ratio {run.mamba_full_memory_ratio:g}"
    return (
        policy,
        f"{100 * run.token_hit_rate:.2f} %",
        f"{100 * run.flops_saved_share:.2f} %",
        *(f"{seconds:.3g} s" for seconds in (run.ttft_s.p50, run.ttft_s.p95, run.ttft_s.p99)),
        f"{run.num_slo_violations:,}",
        f"{run.num_states_kept:,}",
        f"{run.num_states_hit:,}",
        evictions or "0",
        f"{run.num_too_large:,}",
    )
