"""What `benchmark/host_cost` says: medians, the bars that they have to reach, and tables."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from rich.box import SIMPLE
from rich.table import Table

from rig.pools import Core

STOCK = tuple(Core)
RULES = ("lru", "marconi", "best")
QUEUE_BAR_US = 50.0
TICK_BAR_US = 20.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Microseconds a call."""

    median_us: float
    p95_us: float
    num_timed: int


Times: TypeAlias = dict[str, list[float]]
Row: TypeAlias = dict[str, Figures | None]
"""By contender; None for one that took too long to measure."""


def figures_of(times: Times) -> Row:
    """Medians and 95th percentiles; the times are in seconds."""

    def of(seconds: list[float]) -> Figures | None:
        if not seconds:
            return None
        ranked = sorted(seconds)
        p95 = ranked[math.ceil(0.95 * len(ranked)) - 1]
        return Figures(1e6 * statistics.median(ranked), 1e6 * p95, len(ranked))

    return {name: of(seconds) for name, seconds in times.items()}


@dataclass(frozen=True, slots=True)
class Bar:
    """What ours has to reach; `value` is None where stock was too slow to compare with."""

    claim: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether it is reached."""
        return self.value <= self.limit


def median(row: Row, names: Sequence[str], choose: Callable[[list[float]], float]) -> float:
    """Of the medians of those that were measured the one that is chosen."""
    return choose([figures.median_us for name in names if (figures := row[name]) is not None])


def bars(
    match: dict[str, Row],
    extend: dict[str, Row],
    victim: dict[str, dict[int, Row]],
    tier: dict[str, Row],
    queue: dict[str, dict[str, Row]],
    tick: dict[str, Row],
) -> Iterator[Bar]:
    """Each figure that is bounded, the slowest of our rules against the faster core."""
    for case, row in match.items():
        ratio = median(row, ["marconi"], max) / median(row, [Core.RUST], max)
        yield Bar(f"match, {case}: ours over the Rust core", ratio, 1.2)
    yield Bar("extend: ours over stock", median(extend["all"], RULES, max) / median(extend["all"], STOCK, min), 0.2)
    for need, by_size in victim.items():
        first, last = min(by_size), max(by_size)
        for rule in RULES:
            few, many = (median(by_size[size], [rule], max) for size in (first, last))
            yield Bar(f"victim for {need}, {rule}, {last:,} states: us", many, 20.0)
            yield Bar(f"victim for {need}, {rule}: {last:,} over {first:,} states", many / few, 3.0)
    for need, row in tier.items():
        without, above, in_all = (median(row, [name], max) for name in row)
        yield Bar(f"victim for {need}: above a host tier over none", above / without, 2.0)
        yield Bar(f"victim for {need}: above a host tier, with the copy, over none", in_all / without, 2.0)
    for case, rows in queue.items():
        row = rows["for each plan"]
        without, _, many = (median(row, [name], max) for name in row)
        yield Bar(f"queue, {case}: a plan over untold, us", many - without, QUEUE_BAR_US)
    yield Bar("a tick: us", median(tick["a tick"], ["marconi"], max), TICK_BAR_US)


def table_of(title: str, rows: dict[str, Row]) -> Table:
    """A row a case, a column a contender."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = Table(title=title, caption="us, medians and 95th percentiles", box=SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in names:
        table.add_column(f"{'stock' if name in STOCK else 'ours'}\n{name}", justify="right", no_wrap=True)
    for case, row in rows.items():
        cells = [row.get(name) for name in names]
        table.add_row(case, *(short(cell.median_us) if cell else "-" for cell in cells))
        table.add_row("  95 %", *(short(cell.p95_us) if cell else "-" for cell in cells))
    return table


def short(us: float) -> str:
    """Three digits, or all of them."""
    return f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def plain(rows: dict[Any, Row]) -> dict[str, Any]:
    """As JSON has it."""
    return {
        str(case): {str(name): None if figures is None else asdict(figures) for name, figures in row.items()}
        for case, row in rows.items()
    }
