"""The states of a worker in sync, what is requested of it, the limits, and what is counted."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class State(StrEnum):
    """How much of what a worker holds is known; the transitions are in `worker_sync.py`."""

    UNKNOWN = "unknown"
    CURRENT = "current"
    GAP = "gap"
    LOADING = "loading"


class Request(NamedTuple):
    """A request to a worker."""

    worker: str
    first_batch: int | None
    """A replay of the batches from this one on; None for a snapshot."""


@dataclass(frozen=True, slots=True)
class SyncLimits:
    """How much waits, and how long; `ValueError` for what is not above 0."""

    snapshot_period_s: float = 5.0
    """Time between two snapshots of a worker from which nothing is missing."""
    retry_s: float = 1.0
    """Time between two requests for the same gap."""
    max_waiting_batches: int = 4096
    """Batches of a worker that wait for a gap or a snapshot; more are dropped."""
    max_replayed_batches: int = 4096
    """A wider gap is closed by a snapshot."""
    guess_s: float = 10.0
    """After which a guess that no event confirmed is given up."""
    guess_grace_s: float = 1.0
    """How much younger than a snapshot's arrival a guess may be and yet be denied by it: what is younger than that was
    routed while the snapshot was on its way, and it says nothing of it."""
    max_guesses: int = 65_536

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(slots=True)
class SyncStats:
    """Batches and snapshots that did not arrive as they were sent."""

    num_unknown_workers: int = 0
    """Dropped: from a worker that was not added."""
    num_malformed: int = 0
    """Dropped: with a number that cannot be."""
    num_late: int = 0
    """Dropped: of an epoch that is over."""
    num_duplicates: int = 0
    """Dropped: received before, or part of a snapshot that was."""
    num_gaps: int = 0
    num_overflows: int = 0
    """Dropped since too many waited."""
    num_restarts: int = 0
    num_snapshots: int = 0
    """Loaded."""
    num_stale_snapshots: int = 0
    """Dropped: older than what was applied already."""
    num_guesses_given_up: int = 0
    """Expired, denied by a snapshot, or gone with an epoch."""
