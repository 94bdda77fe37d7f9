"""Both sides of every request: a table, a sentence, the first requests of which they part, and rows for JSON."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.box import SIMPLE
from rich.table import Column, Table

MAX_SHOWN: Final = 10
"""Requests of which both sides part that are shown."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request."""

    index: int
    """Position in the trace, from 0."""
    rid: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """By the server."""
    line: str
    num_predicted_tokens: int
    """Cached, by the replay."""
    predicted_line: str

    @property
    def differs(self) -> bool:
        """Whether both sides part."""
        return self.num_cached_tokens != self.num_predicted_tokens


@dataclass(frozen=True, slots=True)
class Comparison:
    """A trace as a server served it, and as its replay did."""

    url: str
    trace: str
    concurrency: int
    tolerance_points: float | None
    """Points of the prompt tokens by which both sides may part; None where no request may differ."""
    num_refused: int
    """Requests that the server refused, and the replay did not get."""
    rows: tuple[Row, ...]

    @property
    def differing(self) -> list[Row]:
        """Requests of which both sides part."""
        return [row for row in self.rows if row.differs]

    @property
    def num_prompt_tokens(self) -> int:
        """Of all requests."""
        return sum(row.num_prompt_tokens for row in self.rows)

    @property
    def points_apart(self) -> float:
        """Predicted less cached tokens, in points of the prompt tokens."""
        apart = sum(row.num_predicted_tokens - row.num_cached_tokens for row in self.rows)
        return 100 * apart / max(self.num_prompt_tokens, 1)

    @property
    def agrees(self) -> bool:
        """Whether both sides are as close as they are to be."""
        if self.tolerance_points is None:
            return not self.differing
        return abs(self.points_apart) <= self.tolerance_points

    def table(self) -> Table:
        """One line of totals."""
        cached = sum(row.num_cached_tokens for row in self.rows)
        predicted = sum(row.num_predicted_tokens for row in self.rows)
        total = max(self.num_prompt_tokens, 1)
        cells = {
            "requests": f"{len(self.rows):,}",
            "prompt tokens": f"{self.num_prompt_tokens:,}",
            "cached by the server": f"{cached:,} ({cached / total:.2%})",
            "predicted": f"{predicted:,} ({predicted / total:.2%})",
            "points apart": f"{self.points_apart:+.2f}",
            "requests that differ": f"{len(self.differing):,}",
        }
        columns = (Column(name, justify="right", no_wrap=True) for name in cells)
        table = Table(*columns, box=SIMPLE, show_edge=False)
        table.add_row(*cells.values())
        return table

    def sentence(self) -> str:
        """Say whether the prediction held."""
        num, differing = len(self.rows), len(self.differing)
        if self.tolerance_points is None:
            if not differing:
                return f"The prediction holds: of {num:,} requests the server cached what the replay says, each time."
            return f"The prediction does not hold: {differing:,} of {num:,} requests differ."
        held = "holds" if self.agrees else "does not hold"
        return (
            f"The prediction {held}: over {num:,} requests both are {abs(self.points_apart):.2f} points of the prompt "
            f"tokens apart, and {self.tolerance_points:g} are allowed."
        )

    def parted(self, least: int = MAX_SHOWN) -> list[str]:
        """The first requests of which both sides part, one line each."""
        return [
            f"{row.rid}: the server {row.num_cached_tokens:,} ({row.line}), the replay {row.num_predicted_tokens:,} "
            f"({row.predicted_line})"
            for row in self.differing[:least]
        ]

    def to_json(self) -> dict[str, Any]:
        """The values for JSON."""
        return {
            "url": self.url,
            "trace": self.trace,
            "concurrency": self.concurrency,
            "tolerance_points": self.tolerance_points,
            "agrees": self.agrees,
            "num_requests": len(self.rows),
            "num_refused": self.num_refused,
            "num_differing": len(self.differing),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": sum(row.num_cached_tokens for row in self.rows),
            "num_predicted_tokens": sum(row.num_predicted_tokens for row in self.rows),
            "points_apart": round(self.points_apart, 6),
            "requests": [asdict(row) for row in self.rows],
        }
