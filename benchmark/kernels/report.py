"""Result rows, the bars that they are held to, and their tables.

Bars, for what exact checkpoints take on a device:

    share           at most 2 % of the layer's own prefill, from 4,096 tokens a sequence on
    floor           at most 1.5 times the bytes that must move over the bandwidth, where a batch fills the chip: where
                    it must move more bytes than the L2 cache holds
    aligned         no longer than SGLang's tracking of one chunk-aligned position a sequence

A bar is None where it does not apply, or where what it needs was not measured.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE
from rich.table import Table

from .shapes import Family
from .timing import Sample
from .traffic import Traffic

MOST_SHARE = 0.02
LEAST_TOKENS_OF_SHARE = 4096
MOST_OVER_FLOOR = 1.5


@dataclass(frozen=True, slots=True)
class Memory:
    """A device's memory: bytes that a large copy reads and writes in a second, bytes of the L2 cache."""

    copy_bytes_per_s: float
    l2_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One layer and batch on a device; `missing` says what could not be measured, and why."""

    model: str
    family: Family
    tokens: int
    num_sequences: int
    num_checkpoints: int
    checkpoint: Sample | None = None
    prefill: Sample | None = None
    aligned: Sample | None = None
    traffic: Traffic | None = None
    missing: tuple[str, ...] = ()

    def without(self, what: str, why: str) -> "Row":
        """Return this row with `what` noted as missing."""
        return replace(self, missing=(*self.missing, f"{what}: {why}"))

    def measured(self, checkpoint: Sample, prefill: Sample | None, aligned: Sample | None, moved: Traffic) -> "Row":
        """Return this row with its figures."""
        return replace(self, checkpoint=checkpoint, prefill=prefill, aligned=aligned, traffic=moved)

    @property
    def share(self) -> float | None:
        """Time of the checkpoints over that of the prefill."""
        return _ratio(self.checkpoint, self.prefill)

    @property
    def over_aligned(self) -> float | None:
        """Time of the checkpoints over that of SGLang's tracking of one position."""
        return _ratio(self.checkpoint, self.aligned)

    def floor_us(self, memory: Memory) -> float | None:
        """The least time that the bytes can take."""
        return None if self.traffic is None else self.traffic.must_bytes / memory.copy_bytes_per_s * 1e6

    def of_floor(self, memory: Memory) -> float | None:
        """The fraction of the memory's speed that was reached."""
        floor_us = self.floor_us(memory)
        return None if floor_us is None or self.checkpoint is None else floor_us / self.checkpoint.median_us

    def fills_chip(self, memory: Memory) -> bool:
        """Whether the launch must move more than the L2 cache holds."""
        return self.traffic is not None and self.traffic.must_bytes > memory.l2_bytes

    def bars(self, memory: Memory) -> dict[str, bool | None]:
        """Whether each bar holds, by name."""
        share = self.share if self.tokens >= LEAST_TOKENS_OF_SHARE else None
        reached = self.of_floor(memory) if self.fills_chip(memory) else None
        over_aligned = self.over_aligned
        return {
            "share": None if share is None else share <= MOST_SHARE,
            "floor": None if reached is None else reached * MOST_OVER_FLOOR >= 1,
            "aligned": None if over_aligned is None else over_aligned <= 1,
        }

    def to_json(self, memory: Memory) -> dict[str, Any]:
        """The row for the result file."""
        return {
            **asdict(self),
            "share": self.share,
            "over_aligned": self.over_aligned,
            "moved_over_must": None if self.traffic is None else self.traffic.moved_bytes / self.traffic.must_bytes,
            "floor_us": self.floor_us(memory),
            "of_floor": self.of_floor(memory),
            "fills_chip": self.fills_chip(memory),
            "bars": self.bars(memory),
        }


@dataclass(frozen=True, slots=True)
class ReferenceRow:
    """An operator's reference on a CPU: a prefill, and states at some positions from what it left."""

    operator: str
    model: str
    num_heads: int
    tokens: int
    num_checkpoints: int
    prefill: Sample
    checkpoint: Sample

    @property
    def prefill_tokens_per_s(self) -> float:
        """Tokens that the prefill computes in a second."""
        return self.tokens / (self.prefill.median_us * 1e-6)

    @property
    def checkpoint_tokens_per_s(self) -> float:
        """Tokens of the prefill over the time of its checkpoints."""
        return self.tokens / (self.checkpoint.median_us * 1e-6)

    def to_json(self) -> dict[str, Any]:
        """The row for the result file."""
        return {
            **asdict(self),
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "checkpoint_tokens_per_s": self.checkpoint_tokens_per_s,
            "share": _ratio(self.checkpoint, self.prefill),
        }


def _ratio(ours: Sample | None, other: Sample | None) -> float | None:
    return None if ours is None or other is None else ours.median_us / other.median_us


def table_of(rows: Sequence[Row], memory: Memory) -> Table:
    """Tabulate a row for each layer and batch; times are medians."""
    caption = (
        "us, medians, from a cold L2 cache; floor: bytes that must move at the speed of a large copy, "
        f"{memory.copy_bytes_per_s / 1e12:.2f} TB/s; aligned: SGLang's one position a sequence"
    )
    table = Table(title="exact checkpoints of one layer", caption=caption, box=SIMPLE, pad_edge=False)
    table.add_column("layer of", no_wrap=True)
    for column in ("tokens", "states", "prefill", "states in", "share", "floor", "of it", "moved", "aligned", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bars", no_wrap=True)
    model = ""
    for row in rows:
        known = {name: holds for name, holds in row.bars(memory).items() if holds is not None}
        verdicts = [f"{name} {'holds' if holds else 'MISSED'}" for name, holds in known.items()]
        moved = row.traffic
        table.add_row(
            row.model if row.model != model else "",
            f"{row.num_sequences} x {row.tokens:,}" if row.num_sequences > 1 else f"{row.tokens:,}",
            str(row.num_checkpoints),
            *(_time(sample) for sample in (row.prefill, row.checkpoint)),
            _percent(row.share),
            "-" if moved is None else f"{row.floor_us(memory):.1f}",
            _percent(row.of_floor(memory)),
            "-" if moved is None else f"{moved.moved_bytes / moved.must_bytes:.2f}",
            _time(row.aligned),
            "-" if row.over_aligned is None else f"{row.over_aligned:.2f}",
            ", ".join(verdicts),
        )
        model = row.model
    return table


def missing_of(rows: Sequence[Row]) -> list[str]:
    """List what could not be measured and why, each once, with the rows that lack it."""
    where: dict[str, list[str]] = {}
    for row in rows:
        for what in row.missing:
            where.setdefault(what, []).append(f"{row.model} {row.num_sequences} x {row.tokens:,}")
    return [
        f"not measured: {what} (all rows)" if len(found) == len(rows) else f"not measured: {what} ({', '.join(found)})"
        for what, found in where.items()
    ]


def reference_table(rows: Sequence[ReferenceRow]) -> Table:
    """Tabulate a row for each operator and length."""
    table = Table(
        title="references",
        caption="processor time of one core, medians; both rates in tokens of the prefill",
        box=SIMPLE,
        pad_edge=False,
    )
    table.add_column("operator", no_wrap=True)
    table.add_column("as in", no_wrap=True)
    for column in ("heads", "tokens", "prefill tokens/s", "checkpoints", "us", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.operator,
            row.model,
            str(row.num_heads),
            f"{row.tokens:,}",
            f"{row.prefill_tokens_per_s:,.0f}",
            str(row.num_checkpoints),
            f"{row.checkpoint.median_us:,.0f}",
            f"{row.checkpoint_tokens_per_s:,.0f}",
        )
    return table


def _time(sample: Sample | None) -> str:
    if sample is None:
        return "-"
    return f"{sample.median_us:.1f}" if sample.median_us < 100 else f"{sample.median_us:,.0f}"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.1f} %"
