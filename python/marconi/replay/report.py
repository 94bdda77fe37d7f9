"""The tables of a report: for each amount of memory, a line a policy.

Where there are block caches, the numbers of the Mooncake-format block replays follow: by their names and without
separators, for comparison with what other such replays print.

A table that is wider than the console is cut between columns into several below each other, each with the policies: by
its parts if they fit, else as many columns as fit at a time. Names and numbers are printed whole. Without a terminal
there is no width to keep.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from marconi.policy.causes import Cause
from marconi.replay.memory import format_bytes
from marconi.replay.result import STDOUT, PolicyResult, Report, write
from marconi.replay.store import Traffic

UNLIMITED_WIDTH = 10_000
"""Columns where the output is no terminal: more than any table has."""


@dataclass(frozen=True, slots=True)
class Column:
    """A number of each policy, in full."""

    name: str
    cells: tuple[str, ...]
    narrow_name: str = ""
    """Its name where tables are stacked, over several lines; the same if empty."""


@dataclass(frozen=True, slots=True)
class WideTable:
    """One table of all columns if the console is wide enough, else several below each other."""

    policies: tuple[tuple[str, ...], ...]
    """The label of each line: the policy, and what it chose."""
    parts: tuple[tuple[Column, ...], ...]
    """Columns that belong together."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Whole, in its parts, or in as many columns as fit at a time."""

        def fits(table: Table) -> bool:
            unlimited = options.update_width(UNLIMITED_WIDTH)
            return Measurement.get(console, unlimited, table).maximum <= options.max_width

        columns = tuple(chain(*self.parts))
        whole = self._wide(columns)
        if fits(whole):
            yield whole
            return
        tables = [self._narrow(part) for part in self.parts]
        if not all(map(fits, tables)):
            tables = []
            while columns:
                sizes = range(len(columns), 1, -1)
                size = next((size for size in sizes if fits(self._narrow(columns[:size]))), 1)
                table = self._narrow(columns[:size])
                # The last resort: a label is folded, a number never.
                table.columns[0].no_wrap = fits(table)
                tables.append(table)
                columns = columns[size:]
        yield from tables

    def _wide(self, columns: Iterable[Column]) -> Table:
        return self._filled(Table(box=SIMPLE), columns, [column.name for column in columns], " ")

    def _narrow(self, columns: Iterable[Column]) -> Table:
        table = Table(box=SIMPLE, collapse_padding=True, pad_edge=False)
        return self._filled(table, columns, [column.narrow_name or column.name for column in columns], "\n")

    def _filled(self, table: Table, columns: Iterable[Column], names: Iterable[str], between: str) -> Table:
        table.add_column("policy", no_wrap=True, overflow="fold")
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        labels = (Text(between.join(label)) for label in self.policies)
        for label, *cells in zip(labels, *(column.cells for column in columns), strict=True):
            table.add_row(label, *cells)
        return table


def console_for_tables() -> Console:
    """Stdout, wide enough for any table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=UNLIMITED_WIDTH)


def deliver(shown: RenderableType, path: Path | None, document: Callable[[], dict[str, Any]]) -> None:
    """Print `shown`, and write `document` to the `path` of `--json`; if that is `STDOUT`, nothing else is printed."""
    if path != STDOUT:
        console_for_tables().print(shown)
    if path is not None:
        write(path, document())


def tables(report: Report, timings: bool = False) -> RenderableType:
    """Every run of `report`; the replay's own speed only with `timings`."""
    by_memory = groupby(report.runs, key=lambda run: run.task.memory_bytes)
    return Group(*(part for memory, runs in by_memory for part in _of_memory(report, memory, list(runs), timings)))


def causes(report: Report) -> RenderableType:
    """The causes of the misses of each run of `report`, in shares of the prompt tokens."""
    by_memory = groupby(report.runs, key=lambda run: run.task.memory_bytes)
    return Group(*(part for memory, runs in by_memory for part in _causes(report, memory, list(runs))))


def _causes(report: Report, memory_bytes: int, runs: Sequence[PolicyResult]) -> Iterator[RenderableType]:
    yield Text(f"{_title(report, memory_bytes)}: prompt tokens missed, by cause", style="table.title")
    yield WideTable(tuple(map(_label, runs)), (_bars(runs), _misses(runs)))


def _of_memory(
    report: Report, memory_bytes: int, runs: Sequence[PolicyResult], timings: bool
) -> Iterator[RenderableType]:
    yield Text(_title(report, memory_bytes), style="table.title")
    stored = [run.traffic for run in runs if run.traffic is not None]
    behind = (_store(stored),) if len(stored) == len(runs) else ()
    yield WideTable(tuple(map(_label, runs)), (_reuse(runs), *behind, _cache(runs, timings)))
    if replays := [run for run in runs if run.block_replay]:
        yield WideTable(tuple((str(run.task.policy),) for run in replays), (_blocks(replays),))


def _title(report: Report, memory_bytes: int) -> str:
    share = f" ({memory_bytes / report.unbounded_bytes:.3g}x of unbounded)" if report.unbounded_bytes else ""
    task = next(run.task for run in report.runs if run.task.memory_bytes == memory_bytes)
    below = f" and {format_bytes(task.host_bytes)} on the host" if task.host_bytes else ""
    below += "" if task.storage is None else f" and {task.storage} behind it"
    inputs = report.inputs
    return (
        f"{inputs.trace.name}, {inputs.model.name} on {inputs.device_name}, "
        f"{format_bytes(memory_bytes)}{share}{below}, {inputs.mode.value}, seed {inputs.seed}"
    )


def _label(run: PolicyResult) -> tuple[str, ...]:
    task = run.task
    policy = str(task.policy) if task.mamba_ratio is None else f"{task.policy}, ratio {task.mamba_ratio:g}"
    policy += ", int8" if task.int8_checkpoints else ""
    return (policy,) if run.chosen is None else (policy, f"({run.chosen})")


def _reuse(runs: Sequence[PolicyResult]) -> tuple[Column, ...]:
    """Columns of reuse: savings, and the times of requests."""
    ttft_s, bound = [run.ttft_s for run in runs], Column("bound", _most(runs))
    loads = [run.num_loads for run in runs]
    loading = Column("loading", tuple(f"{run.load_s:.3g} s" for run in runs))
    return (
        Column("hit rate", tuple(f"{100 * run.token_hit_rate:.2f} %" for run in runs), "hit\nrate"),
        *((bound,) if any(bound.cells) else ()),
        Column("amplification", tuple(f"{run.amplification:.2f}x" for run in runs), "ampli-\nfication"),
        Column("FLOPs saved", tuple(f"{100 * run.flops_saved_share:.2f} %" for run in runs), "FLOPs\nsaved"),
        Column("TTFT p50", tuple(f"{each.p50:.3g} s" for each in ttft_s), "TTFT\np50"),
        Column("p95", tuple(f"{each.p95:.3g} s" for each in ttft_s), "TTFT\np95"),
        Column("p99", tuple(f"{each.p99:.3g} s" for each in ttft_s), "TTFT\np99"),
        Column(f"> {runs[0].slo_s:g} s", tuple(f"{run.num_slo_violations:,}" for run in runs)),
        *((Column("loads", tuple(f"{count:,}" for count in loads)), loading) if any(loads) else ()),
    )


def _store(traffic: Sequence[Traffic]) -> tuple[Column, ...]:
    """Columns of the store behind the host: what was hit, read and written."""
    return (
        Column("tokens from storage", tuple(f"{each.num_hit_tokens:,}" for each in traffic), "tokens from\nstorage"),
        Column("written", tuple(format_bytes(each.num_written_bytes) for each in traffic)),
        Column("read", tuple(format_bytes(each.num_read_bytes) for each in traffic)),
        Column("reading", tuple(f"{each.read_s:.3g} s" for each in traffic)),
    )


def _cache(runs: Sequence[PolicyResult], timings: bool) -> tuple[Column, ...]:
    """Columns of the cache: states kept, used and evicted."""
    evictions = (", ".join(f"{count:,} {reason}" for reason, count in run.num_evictions if count) for run in runs)
    columns = (
        Column("states kept", tuple(f"{run.num_states_kept:,}" for run in runs), "states\nkept"),
        Column("states hit", tuple(f"{run.num_states_hit:,}" for run in runs), "states\nhit"),
        Column("evictions", tuple(each or "0" for each in evictions)),
        Column("too large", tuple(f"{run.num_too_large:,}" for run in runs), "too\nlarge"),
    )
    speed = Column("requests/s", tuple(f"{run.requests_per_s:,.0f}" for run in runs), "requests\n/s")
    return (*columns, speed) if timings else columns


def _misses(runs: Sequence[PolicyResult]) -> tuple[Column, ...]:
    """A column for each cause of a miss, in shares of the prompt tokens, those that any run has."""
    missed = [dict(run.num_missed_tokens) for run in runs]
    causes = [cause for cause in Cause if any(cause.value in each for each in missed)]
    return tuple(
        Column(
            cause.words,
            tuple(_share(each.get(cause, 0), run) if each else "" for each, run in zip(missed, runs, strict=True)),
            cause.words.replace(" ", "\n"),
        )
        for cause in causes
    )


def _bars(runs: Sequence[PolicyResult]) -> tuple[Column, ...]:
    """Columns of what was hit, the most that any rule hits in this memory, and the most in any memory."""
    return (
        Column("cached", tuple(f"{100 * run.token_hit_rate:.2f} %" for run in runs)),
        Column("at best here", _most(runs), "at best\nhere"),
        Column(
            "in any memory",
            tuple(_share(run.num_prompt_tokens - run.num_new_tokens, run) for run in runs),
            "in any\nmemory",
        ),
    )


def _most(runs: Sequence[PolicyResult]) -> tuple[str, ...]:
    return tuple("" if (rate := run.bound_token_hit_rate) is None else f"{100 * rate:.2f} %" for run in runs)


def _share(num_tokens: int, run: PolicyResult) -> str:
    return f"{100 * num_tokens / max(run.num_prompt_tokens, 1):.2f} %"


def _blocks(runs: Sequence[PolicyResult]) -> tuple[Column, ...]:
    def text(number: float) -> str:
        return f"{number:.6f}" if isinstance(number, float) else str(number)

    return tuple(Column(name, tuple(text(run.block_replay[name]) for run in runs)) for name in runs[0].block_replay)
