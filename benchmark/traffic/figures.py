"""What is counted: a row for each shape and memory, and what is said of all of them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from .oracle import Asked, could_be, knowable
from .servers import DEFAULTS, Server

MARGIN = 0.005
"""How far ours may be under the best of stock's, as a share of the prompt tokens."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Evictions above a host tier, how many of them waited for copies, and missed tokens by cause."""

    num_evictions: int = 0
    num_waits: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)

    def since(self, before: "Counters") -> "Counters":
        """What has come since `before`."""
        missed = {cause: num - before.missed.get(cause, 0) for cause, num in self.missed.items()}
        return Counters(self.num_evictions - before.num_evictions, self.num_waits - before.num_waits, missed)


@dataclass(frozen=True, slots=True)
class Count:
    """One shape on one server."""

    num_requests: int
    num_prompt_tokens: int
    num_could_be_tokens: int
    num_knowable_tokens: int
    num_cached_tokens: int
    ttft_s: float
    """Median."""
    num_evictions: int = 0
    """Above a host tier."""
    num_waits: int = 0
    """Those of them that waited for copies."""
    missed: Mapping[str, int] = field(default_factory=dict)
    """Tokens by cause, of requests that are not counted, too; none of stock's."""

    @classmethod
    def of(cls, asked: Sequence[Asked], counters: Counters | None = None) -> "Count":
        """Of all requests of a shape, in their order."""
        counters = counters or Counters()
        served = [each.served for each in asked]
        counted = [each for each in asked if each.is_counted]
        could, known = (
            sum(tokens for each, tokens in zip(asked, per_request, strict=True) if each.is_counted)
            for per_request in (could_be(served), knowable(served))
        )
        return cls(
            num_requests=len(counted),
            num_prompt_tokens=sum(len(each.served.prompt) for each in counted),
            num_could_be_tokens=could,
            num_knowable_tokens=known,
            num_cached_tokens=sum(each.num_cached_tokens for each in counted),
            ttft_s=statistics.median(each.ttft_s for each in counted),
            num_evictions=counters.num_evictions,
            num_waits=counters.num_waits,
            missed={cause: num for cause, num in counters.missed.items() if num},
        )

    @property
    def share(self) -> float | None:
        """Cached tokens over those that could be; None where nothing could be."""
        return self._over(self.num_cached_tokens)

    @property
    def knowable_share(self) -> float | None:
        """The same of what can be known."""
        return self._over(self.num_knowable_tokens)

    def _over(self, num_tokens: int) -> float | None:
        return num_tokens / self.num_could_be_tokens if self.num_could_be_tokens else None

    def to_json(self) -> dict[str, Any]:
        """By name."""
        return {field: getattr(self, field) for field in self.__slots__}


@dataclass(frozen=True, slots=True)
class Row:
    """One shape with one amount of memory, by server."""

    shape: str
    memory: str
    counts: Mapping[Server, Count]

    @property
    def behind(self) -> float | None:
        """By how much the least of `DEFAULTS` is under the best of stock's, as a share of the prompt tokens.

        None without both.
        """
        stock, ours = self._asked(_STOCK), self._asked(DEFAULTS)
        if not stock or not ours:
            return None
        num_behind = max(each.num_cached_tokens for each in stock) - min(each.num_cached_tokens for each in ours)
        return num_behind / max(ours[0].num_prompt_tokens, 1)

    def best(self, *, is_ours: bool) -> float | None:
        """The best share of stock's servers, or of this project's in two pools; None where none was asked."""
        asked = self._asked(DEFAULTS[:1] if is_ours else _STOCK)
        return max((each.share or 0.0 for each in asked), default=None)

    def _asked(self, servers: Sequence[Server]) -> list[Count]:
        return [self.counts[each] for each in servers if each in self.counts]

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Row":
        """From what `to_json` gave."""
        counts = {Server(name): Count(**count) for name, count in document["servers"].items()}
        return cls(document["shape"], document["memory"], counts)

    def to_json(self) -> dict[str, Any]:
        """As the result file holds it."""
        servers = {str(server): count.to_json() for server, count in self.counts.items()}
        return {"shape": self.shape, "memory": self.memory, "servers": servers}


_STOCK = tuple(server for server in Server if not server.is_ours)


def behind(rows: Sequence[Row]) -> list[Row]:
    """Those rows in which ours is under stock's by more than the margin."""
    return [row for row in rows if (row.behind or 0.0) > MARGIN]


def table_of(rows: Sequence[Row], servers: Sequence[Server], title: str) -> Table:
    """A line a row, and the mean."""
    table = Table(title=title, box=SIMPLE, show_footer=True, caption="cached tokens in % of those that could be")
    counted = {server: [row.counts[server] for row in rows if server in row.counts] for server in servers}
    means = {server: _mean([count.share for count in counts]) for server, counts in counted.items()}
    known = [next(iter(row.counts.values())).knowable_share for row in rows]
    table.add_column("shape", no_wrap=True, footer="mean")
    table.add_column("memory", no_wrap=True)
    for name in ("prompt", "could be"):
        table.add_column(name, justify="right")
    for server in servers:
        table.add_column(server.replace("-", "\n", 1), justify="right", footer=_percent(means[server]))
    table.add_column("knowable", justify="right", footer=_percent(_mean(known)))
    table.add_column("first token\nours/stock", justify="right")
    table.add_column("behind", justify="right", footer=str(len(behind(rows))))
    waits = [row.counts[Server.MARCONI] for row in rows if Server.MARCONI in row.counts]
    is_tiered = any(count.num_evictions for count in waits)
    if is_tiered:
        table.add_column("evictions\nwaited", justify="right", footer=_waited(waits))
    late = behind(rows)
    for row in rows:
        some = next(iter(row.counts.values()))
        table.add_row(
            row.shape,
            row.memory,
            f"{some.num_prompt_tokens}",
            f"{some.num_could_be_tokens}",
            *(_percent(row.counts[server].share if server in row.counts else None) for server in servers),
            _percent(some.knowable_share),
            _ratio(row),
            f"{100 * (row.behind or 0.0):.1f}" if row in late else "",
            *([_waited([row.counts[Server.MARCONI]] if Server.MARCONI in row.counts else [])] if is_tiered else []),
        )
    return table


def causes_of(rows: Sequence[Row], servers: Sequence[Server]) -> Table:
    """A line a row and server of this project's: missed tokens by cause."""
    table = Table(title="missed tokens by cause", box=SIMPLE)
    for name in ("shape", "memory", "server"):
        table.add_column(name, no_wrap=True)
    causes = dict.fromkeys(cause for row in rows for count in row.counts.values() for cause in count.missed)
    for cause in causes:
        table.add_column(cause.replace("_", " "), justify="right")
    for row in rows:
        for server in servers:
            missed = row.counts[server].missed if server in row.counts else {}
            if missed:
                table.add_row(row.shape, row.memory, server, *(f"{missed.get(cause, 0):,}" for cause in causes))
    return table


def _mean(shares: Sequence[float | None]) -> float | None:
    """Over the rows in which anything could be."""
    known = [share for share in shares if share is not None]
    return statistics.mean(known) if known else None


def _waited(counts: Sequence[Count]) -> str:
    num_evictions = sum(count.num_evictions for count in counts)
    return f"{sum(count.num_waits for count in counts)} of {num_evictions}" if num_evictions else ""


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _ratio(row: Row) -> str:
    times = [row.counts[server].ttft_s for server in (Server.MARCONI, Server.STOCK) if server in row.counts]
    return f"{times[0] / times[1]:.2f}" if len(times) == 2 and all(times) else "-"
