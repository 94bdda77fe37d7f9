"""What keeping a fleet's index true takes from its caller, and tells it."""

from dataclasses import dataclass
from typing import NamedTuple


class Missing(NamedTuple):
    """Batches to ask a worker for again, first to last."""

    worker: str
    epoch: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is waited for, and how long; `ValueError` for what is not above 0."""

    max_waiting_batches: int = 4096
    """Of a worker, held back because of a gap before them or a snapshot under way; more are dropped."""
    max_replayed_batches: int = 4096
    """A wider gap is not asked for again: the next snapshot closes it."""
    retry_s: float = 1.0
    """Between two requests for the same gap."""
    guess_s: float = 10.0
    """After which a guess that no event confirmed is given up."""
    guess_grace_s: float = 1.0
    """How much younger than a snapshot's arrival a guess may be and yet be denied by it: what is younger than that was
    routed while the snapshot was on its way, and it says nothing of it."""
    max_guesses: int = 65_536

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)}: give more than 0")


@dataclass(slots=True)
class Counters:
    """What did not arrive as it was sent, in batches or snapshots."""

    num_unknown_workers: int = 0
    """From a worker that was not added: dropped."""
    num_malformed: int = 0
    """With a number that cannot be: dropped."""
    num_late: int = 0
    """Of an epoch that is over: dropped."""
    num_duplicates: int = 0
    """Received before, or part of a snapshot that was: dropped."""
    num_gaps: int = 0
    num_overflows: int = 0
    """Dropped since too many waited."""
    num_restarts: int = 0
    num_snapshots: int = 0
    """Applied."""
    num_stale_snapshots: int = 0
    """Older than what was applied already: dropped."""
    num_guesses_given_up: int = 0
    """Expired, denied by a snapshot, or gone with an epoch."""
