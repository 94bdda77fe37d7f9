"""The contract of a figure: which replays it needs, the numbers it shows, how they are drawn, what is said of them.

Numbers are plain JSON, rounded to the digits that mean something, and follow from the scale alone, to the byte.
What is said is worked out from the numbers: a `Claim` is a statement of the paper and whether it holds here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from .cells import Cell, Sample

if TYPE_CHECKING:
    from .canvas import Canvas

Numbers: TypeAlias = dict[str, Any]
"""What a figure shows, as JSON."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is replayed. `ValueError` for a negative seed or less than one session."""

    seed: int = 0
    num_sessions: int = 100
    """Of a trace of the Marconi figures; the paper has 100. Memory is given for 100 and shrinks with them."""
    num_chats: int = 800
    """Of the trace of the T-LRU figures: about 1,500 turns, the paper has 1,000 to 2,000."""
    num_seeds: int = 3
    """Traces over which a figure of a single setting takes its mean."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed must be 0 or more, got {self.seed}")
        if min(self.num_sessions, self.num_chats, self.num_seeds) < 1:
            raise ValueError(f"counts must be at least 1, got {self}")

    @property
    def seeds(self) -> range:
        """One for each trace of a mean."""
        return range(self.seed, self.seed + self.num_seeds)

    def memory_bytes(self, gigabytes: float) -> int:
        """What stands for so many gigabytes (1e9 bytes) at 100 sessions."""
        return int(gigabytes * 1e9 * self.num_sessions / 100)


@dataclass(frozen=True, slots=True)
class Claim:
    """What the paper found, in words that go on from "that", and whether it is found here."""

    said: str
    paper: str
    """Its numbers; empty where it gives none."""
    here: str
    """The numbers here."""
    holds: bool
    cause: str = ""
    """Why it does not hold, if it does not; said in that case alone."""

    def __str__(self) -> str:
        numbers = f"paper: {self.paper}; here: {self.here}" if self.paper else f"here: {self.here}"
        cause = f"; cause: {self.cause}" if self.cause and not self.holds else ""
        return f"that {self.said} ({numbers}{cause})"


class Figure(ABC):
    """One figure or table."""

    id: ClassVar[str]
    """As on the command line, and the name of its files."""
    title: ClassVar[str]
    shows: ClassVar[str]
    """What is drawn, and from which replays, in a sentence or two."""
    num_rows: ClassVar[int] = 1
    num_columns: ClassVar[int] = 1
    """Of panels."""

    def cells(self, scale: Scale) -> Sequence[Cell]:
        """The replays that it needs; none by default."""
        return ()

    @abstractmethod
    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """What is shown, from the samples of `cells`."""

    @abstractmethod
    def draw(self, numbers: Numbers, canvas: "Canvas") -> None:
        """Draw `numbers`."""

    @abstractmethod
    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """What the paper says of its figure, held against `numbers`."""


def verdict(claims: Sequence[Claim]) -> str:
    """One sentence: where a figure agrees with the paper and where not."""
    agreed = [str(claim) for claim in claims if claim.holds]
    others = [str(claim) for claim in claims if not claim.holds]
    if not agreed:
        return f"Does not agree {_join(others, 'nor')}."
    return f"Agrees {_join(agreed, 'and')}" + (f", but not {_join(others, 'nor')}." if others else ".")


def _join(parts: Sequence[str], conjunction: str) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {conjunction} {parts[-1]}"
