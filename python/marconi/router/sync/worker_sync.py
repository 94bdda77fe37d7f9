"""Keeps what a router knows of one worker in sync with it, over a network that loses, repeats and reorders.

                               requests
    UNKNOWN   nothing of this epoch is applied              a snapshot
    CURRENT   every batch before `next` is applied          a snapshot, every `snapshot_period_s`
    GAP       batches wait for one that is missing          a replay from that one on
    LOADING   a snapshot is loaded, piece by piece          nothing; batches wait

    UNKNOWN --batch 0--------------------> CURRENT
    CURRENT --a batch beyond the next----> GAP
    GAP ------the batches between--------> CURRENT
    UNKNOWN, CURRENT, GAP --a snapshot---> LOADING
    LOADING --loaded---------------------> CURRENT, or GAP if what waits does not follow on it
    any ------a higher epoch-------------> UNKNOWN, and what the worker held is forgotten at once

A batch is applied when its turn comes, and once. A request that changed nothing is made again after `retry_s`, and then
for the other of the two: a snapshot where the replay did not bring the missing batch, a replay where no snapshot came.
A replay that ended without it, and a gap too wide to be replayed, request the snapshot at once. So whatever the network
did, the index is what the worker holds as soon as one snapshot and the batches after it have arrived.

Time is passed in, in seconds of any clock that does not go back. Owned by `Fleet`.
"""

from collections.abc import Generator

from marconi.events.base import Batch, Cleared, ReplayEnd, Snapshot, StateStored
from marconi.router.index import FleetIndex
from marconi.router.sync.base import Request, State, SyncLimits, SyncStats
from marconi.router.sync.guesses import Guesses


class WorkerSync:
    """The sync of one worker; see the module."""

    def __init__(self, worker: str, index: FleetIndex, guesses: Guesses, limits: SyncLimits, stats: SyncStats) -> None:
        """The worker is one of `index`, and holds nothing there."""
        self.worker = worker
        self.state = State.UNKNOWN
        self.received_s: float | None = None
        """When anything of the present epoch last arrived."""
        self._index = index
        self._guesses = guesses
        self._limits = limits
        self._stats = stats
        self._epoch = -1
        self._begin(-1)

    def _begin(self, epoch: int) -> None:
        self.state, self._epoch = State.UNKNOWN, epoch
        self._next = 0
        self._is_known = False
        self._waiting: dict[int, Batch] = {}
        self._last_number = -1
        """The number of the latest snapshot."""
        self._loading: Generator[int, None, None] | None = None
        self._snapshots: list[tuple[Snapshot, float]] = []
        """The one that is being loaded, and the one to load after it, each with its arrival."""
        self._requested_s: float | None = None
        self._last_was_replay = True

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do until something arrives."""
        return self._loading is None and self._next not in self._waiting

    def receive(self, message: Batch | Snapshot | ReplayEnd, now_s: float) -> None:
        """Take what has arrived from the worker."""
        if isinstance(message, ReplayEnd):
            if self.state in (State.UNKNOWN, State.GAP) and self._last_was_replay:
                self._requested_s = None
            return
        if not self._is_of_present_epoch(message):
            return
        self.received_s = now_s
        if isinstance(message, Snapshot):
            self._receive_snapshot(message, now_s)
        else:
            self._receive_batch(message)
        self._update_state()

    def work(self, max_entries: int) -> int:
        """Load the snapshot, or apply what waits, by about so many entries; returns how many it were, 1 or more."""
        num_entries = 0
        while num_entries < max_entries and self._loading is not None:
            num_loaded = next(self._loading, None)
            if num_loaded is None:
                self._finish_loading()
            else:
                num_entries += num_loaded
        while num_entries < max_entries and (batch := self._waiting.pop(self._next, None)) is not None:
            self._apply(batch)
            num_entries += len(batch.events)
        self._update_state()
        return max(1, num_entries)

    def request(self, now_s: float) -> Request | None:
        """The request to make of the worker now, if any; it counts as made."""
        wait_s = self._limits.snapshot_period_s if self.state is State.CURRENT else self._limits.retry_s
        is_early = self._requested_s is not None and now_s - self._requested_s < wait_s
        if self.state is State.LOADING or is_early:
            return None
        num_missing = min(self._waiting, default=self._next) - self._next
        self._last_was_replay = not self._last_was_replay and 0 < num_missing <= self._limits.max_replayed_batches
        self._requested_s = now_s
        return Request(self.worker, self._next if self._last_was_replay else None)

    def close(self) -> None:
        """Give up what is being loaded."""
        if self._loading is not None:
            self._loading.close()

    def _is_of_present_epoch(self, message: Batch | Snapshot) -> bool:
        """Whether a message is to be taken; a higher epoch begins."""
        if message.epoch < 0 or message.sequence < (-1 if isinstance(message, Snapshot) else 0):
            self._stats.num_malformed += 1
            return False
        if message.epoch < self._epoch:
            self._stats.num_late += 1
            return False
        if self._epoch < 0:
            self._epoch = message.epoch
        elif message.epoch > self._epoch:
            self._stats.num_restarts += 1
            self.close()
            self._index.clear(self.worker)
            self._guesses.deny(self.worker, float("inf"))
            self._begin(message.epoch)
        return True

    def _receive_batch(self, batch: Batch) -> None:
        if batch.sequence < self._next or batch.sequence in self._waiting:
            self._stats.num_duplicates += 1
        elif batch.sequence == self._next and self._loading is None:
            self._apply(batch)
        elif len(self._waiting) >= self._limits.max_waiting_batches:
            self._stats.num_overflows += 1
        else:
            self._waiting[batch.sequence] = batch

    def _receive_snapshot(self, snapshot: Snapshot, now_s: float) -> None:
        if snapshot.number <= self._last_number or snapshot.sequence < self._next - 1:
            self._stats.num_stale_snapshots += 1
            return
        self._last_number = snapshot.number
        self._snapshots[1:] = [(snapshot, now_s)]
        self._begin_loading()

    def _begin_loading(self) -> None:
        if self._loading is None and self._snapshots:
            self._loading = self._index.load(self.worker, self._snapshots[0][0].events)

    def _finish_loading(self) -> None:
        (snapshot, arrived_s), self._loading = self._snapshots.pop(0), None
        self._stats.num_snapshots += 1
        self._is_known, self._next = True, snapshot.sequence + 1
        self._waiting = {number: batch for number, batch in self._waiting.items() if number >= self._next}
        for namespace, block_hash in self._guesses.of_worker(self.worker):
            if self._index.has_state(self.worker, namespace, block_hash):
                self._guesses.confirm(self.worker, namespace, block_hash)
        self._guesses.deny(self.worker, arrived_s - self._limits.guess_grace_s)
        self._begin_loading()

    def _apply(self, batch: Batch) -> None:
        self._is_known, self._next = True, batch.sequence + 1
        self._index.apply(self.worker, batch.events)
        if not len(self._guesses):
            return
        for event in batch.events:
            if isinstance(event, StateStored):
                self._guesses.confirm(self.worker, event.namespace, event.block_hash)
            elif isinstance(event, Cleared):
                self._guesses.deny(self.worker, float("inf"))

    def _update_state(self) -> None:
        before = self.state
        if self._loading is not None:
            self.state = State.LOADING
        elif not self._is_known:
            self.state = State.UNKNOWN
        else:
            self.state = State.CURRENT if not self._waiting or self._next in self._waiting else State.GAP
        if self.state is State.GAP and before is not State.GAP:
            self._stats.num_gaps += 1
            self._requested_s, self._last_was_replay = None, False
        elif self.state is State.CURRENT and self._requested_s is None:
            # Nothing is missing since batch 0: the first snapshot has a period's time.
            self._requested_s = self.received_s
