"""What a router has received of one worker, and what it still waits for.

    epoch      the life of the worker that it follows; a later one begins it anew, an earlier one is over
    next       the sequence number of the batch to apply next; all before it are applied, or part of a snapshot
    waiting    batches beyond `next`, held back until those before them are there

A view is *doubtful* while batches are missing: what it says may be out of date until they, or a snapshot, arrive.
"""

from marconi.router.events.base import Batch, Snapshot
from marconi.router.index.replacement import Replacement


class View:
    """Owned by `Fleet`."""

    __slots__ = (
        "applying",
        "arrived_s",
        "asked_s",
        "epoch",
        "heard_s",
        "is_begun",
        "last_number",
        "next",
        "next_snapshot",
        "replacement",
        "waiting",
    )

    def __init__(self) -> None:
        self.epoch = 0
        self.is_begun = False
        """Whether anything was received at all."""
        self.heard_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self.next = 0
        self.last_number = -1
        """Of the latest snapshot."""
        self.waiting: dict[int, Batch] = {}
        self.replacement: Replacement | None = None
        self.applying: Snapshot | None = None
        self.arrived_s = 0.0
        """When the snapshot arrived that is being applied."""
        self.next_snapshot: tuple[Snapshot, float] | None = None
        """Arrived while another was being applied, and when."""
        self.asked_s: float | None = None
        """When what is missing was last asked for."""

    def begin(self, epoch: int) -> None:
        """Follow another life of the worker, from its first batch."""
        self.epoch, self.is_begun = epoch, True
        self._reset()

    @property
    def missing(self) -> tuple[int, int] | None:
        """The first and last batch of the gap before the earliest that waits; None if there is none."""
        return (self.next, min(self.waiting) - 1) if self.has_gap else None

    @property
    def has_gap(self) -> bool:
        """Whether something waits for a batch that is not there, and no snapshot is under way."""
        return bool(self.waiting) and self.next not in self.waiting and self.applying is None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until something arrives."""
        return self.applying is None and self.next not in self.waiting
