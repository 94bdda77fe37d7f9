"""Keeps what a router knows of its workers in sync with them, over a network that loses, repeats and reorders events.

    receive    take a worker's batch or snapshot                batches whose turn it is are applied at once
    work       load snapshots, apply what waited, sweep         a piece at a time, with decisions in between
    requests   what to request of workers now                   when anything has arrived, and now and then
    hits       what each worker has of a prompt                 by the index, or by a guess

The sync of one worker:

    state     what is known                                     what is requested
    UNKNOWN   nothing of this epoch is applied                  a snapshot
    CURRENT   every batch before `next` is applied              a snapshot, every `snapshot_period_s`
    GAP       batches wait for one that is missing              a replay from that one on
    LOADING   a snapshot is loaded, piece by piece              nothing; batches wait

    UNKNOWN --batch 0----------------------> CURRENT
    CURRENT --a batch later than the next--> GAP
    GAP ------the batches between----------> CURRENT
    UNKNOWN, CURRENT, GAP --a snapshot-----> LOADING
    LOADING --loaded-----------------------> CURRENT, or GAP if what waits does not follow on it
    any ------a higher epoch---------------> UNKNOWN, and what the worker held is forgotten at once

A batch is applied when its turn comes, and once. A request that changed nothing is made again after `retry_s`, and then
for the other of the two: a snapshot where the replay did not bring the missing batch, a replay where no snapshot came.
A replay that ended without it, and a gap too wide to be replayed, request the snapshot at once. So whatever the network
did, the index is what the worker holds as soon as one snapshot and the batches after it have arrived.

A worker's load needs no repair: the latest one counts, as long as it is fresh (`load_report.py`).

Time is passed in, in seconds of any clock that does not decrease. One thread.
"""

from collections.abc import Generator, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from marconi.events.base import Batch, Cleared, Event, KvRemoved, KvStored, ReplayEnd, Snapshot, StateStored, WorkerLoad
from marconi.router.guesses import Guesses
from marconi.router.index import NO_HIT, Chain, FleetIndex, Hit
from marconi.router.load_report import LoadReport

PIECE_ENTRIES: Final = 256
MIN_TURNOVER_BLOCKS: Final = 64
"""Stored blocks that say something of how many are removed for them."""


class State(StrEnum):
    """How much of what a worker holds is known."""

    UNKNOWN = "unknown"
    CURRENT = "current"
    GAP = "gap"
    LOADING = "loading"


class SnapshotRequest(NamedTuple):
    """A request to a worker."""

    worker: str
    first_batch: int | None
    """A replay of the batches from this one on; None for a snapshot."""


@dataclass(frozen=True, slots=True)
class SyncLimits:
    """How much waits, and how long; `ValueError` for a limit that is not above 0."""

    snapshot_period_s: float = 5.0
    """Time between two snapshots of a worker from which nothing is missing."""
    retry_s: float = 1.0
    """Time between two requests for the same gap."""
    max_waiting_batches: int = 4096
    """Batches of a worker that wait for a gap or a snapshot; more are dropped."""
    max_replayed_batches: int = 4096
    """A wider gap is closed by a snapshot."""
    guess_s: float = 10.0
    """Age at which an unconfirmed guess expires."""
    guess_grace_s: float = 1.0
    """Age that a guess must have when a snapshot arrives to be denied by it: a younger one was routed while the
    snapshot was on its way."""
    max_guesses: int = 65_536
    fresh_s: float = 2.0
    """Time for which a worker's load holds: a busy one reports it several times in that."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")


@dataclass(slots=True)
class SyncStats:
    """Counters of batches and snapshots that did not arrive as they were sent."""

    num_unknown_workers: int = 0
    """Dropped: from a worker that was not added."""
    num_malformed: int = 0
    """Dropped: a negative epoch or sequence number."""
    num_late: int = 0
    """Dropped: from an epoch that has ended."""
    num_duplicates: int = 0
    """Dropped: received before, or part of a snapshot that was."""
    num_gaps: int = 0
    num_overflows: int = 0
    """Dropped since too many waited."""
    num_restarts: int = 0
    num_snapshots: int = 0
    """Loaded."""
    num_stale_snapshots: int = 0
    """Dropped: older than the batches applied already."""


@dataclass(slots=True)
class Turnover:
    """How much of what a worker stores takes the place of something else, of late."""

    _num_stored: float = 0.0
    _num_removed: float = 0.0

    @property
    def share(self) -> float:
        """Blocks removed over blocks stored: 0 while there is room, 1 where each block evicts another."""
        if self._num_stored < MIN_TURNOVER_BLOCKS / 2:
            return 0.0
        return min(self._num_removed / self._num_stored, 1.0)

    def count(self, events: Iterable[Event], num_held: int) -> None:
        """Count a batch, after which the worker holds `num_held` entries; earlier counts decay by halves."""
        for event in events:
            if isinstance(event, KvStored):
                self._num_stored += len(event.block_hashes)
            elif isinstance(event, KvRemoved):
                self._num_removed += len(event.block_hashes)
            elif isinstance(event, Cleared):
                self._num_stored = self._num_removed = 0.0
        if self._num_stored > max(num_held, MIN_TURNOVER_BLOCKS):
            self._num_stored, self._num_removed = self._num_stored / 2, self._num_removed / 2


class WorkerSync:
    """The sync of one worker. Owned by `Fleet`."""

    def __init__(self, worker: str, index: FleetIndex, guesses: Guesses, limits: SyncLimits, stats: SyncStats) -> None:
        """Begin for a worker of `index` that holds nothing there."""
        self.worker = worker
        self.received_s: float | None = None
        """When anything of the present epoch last arrived; None if nothing did."""
        self._index = index
        self._guesses = guesses
        self._limits = limits
        self._stats = stats
        self._epoch = -1
        self._begin(-1)

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        self.state = State.UNKNOWN
        """How much of what the worker holds is known."""
        self.turnover = Turnover()
        self.load_report: LoadReport | None = None
        """Its last load, which its events gave or it itself when it was asked, fresh or not; None if there was none."""
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
        """True if there is nothing to do until something arrives."""
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
            if message.load is not None:
                self._hear(message.load, message.sequence, now_s)
            self._receive_batch(message)
        self._update_state()

    def work(self, max_entries: int) -> int:
        """Load the snapshot or apply what waits, about `max_entries` of it; returns how many entries, 1 or more."""
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

    def request(self, now_s: float) -> SnapshotRequest | None:
        """The request to make of the worker now, if any; it counts as made."""
        wait_s = self._limits.snapshot_period_s if self.state is State.CURRENT else self._limits.retry_s
        is_early = self._requested_s is not None and now_s - self._requested_s < wait_s
        if self.state is State.LOADING or is_early:
            return None
        num_missing = min(self._waiting, default=self._next) - self._next
        self._last_was_replay = not self._last_was_replay and 0 < num_missing <= self._limits.max_replayed_batches
        self._requested_s = now_s
        return SnapshotRequest(self.worker, self._next if self._last_was_replay else None)

    def close(self) -> None:
        """Stop loading a snapshot."""
        if self._loading is not None:
            self._loading.close()

    def _is_of_present_epoch(self, message: Batch | Snapshot) -> bool:
        """True if a message is to be taken; begins the epoch that it is the first of."""
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
            self._guesses.deny(self.worker)
            self._begin(message.epoch)
        return True

    def _hear(self, load: WorkerLoad, sequence: int, now_s: float) -> None:
        before = None if self.load_report is None else self.load_report.sequence
        if before is None or sequence > before:
            self.load_report = LoadReport(load, now_s - load.age_s, now_s, self._limits.fresh_s, sequence)

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
        for namespace, block_hash in self._guesses.of_worker(self.worker, arrived_s - self._limits.guess_grace_s):
            if self._index.holds(self.worker, namespace, block_hash):
                self._guesses.confirm(self.worker, namespace, block_hash)
        self._guesses.deny(self.worker, arrived_s - self._limits.guess_grace_s)
        self._begin_loading()

    def _apply(self, batch: Batch) -> None:
        self._is_known, self._next = True, batch.sequence + 1
        self._index.apply(self.worker, batch.events)
        self.turnover.count(batch.events, self._index.holding(self.worker).num_entries)
        if not len(self._guesses):
            return
        for event in batch.events:
            if isinstance(event, StateStored):
                self._guesses.confirm(self.worker, event.namespace, event.block_hash)
            elif isinstance(event, KvStored):
                before = () if event.parent_hash is None else (event.parent_hash,)
                for block_hash in (*before, *event.block_hashes):
                    self._guesses.confirm(self.worker, event.namespace, block_hash)
            elif isinstance(event, Cleared):
                self._guesses.deny(self.worker)

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


class Fleet:
    """An index in sync with each worker's events, and guesses of what comes next; see the module."""

    def __init__(self, index: FleetIndex, limits: SyncLimits | None = None) -> None:
        self.index = index
        self.limits = SyncLimits() if limits is None else limits
        self.stats = SyncStats()
        self.guesses = Guesses(self.limits.guess_s, self.limits.max_guesses)
        self._workers: dict[str, WorkerSync] = {}
        self._busy: dict[str, WorkerSync] = {}
        """Workers with work to do, in the order in which they got it."""

    def add_worker(self, worker: str) -> None:
        """Follow a worker; `ValueError` if it is known."""
        self.index.add_worker(worker)
        self._workers[worker] = WorkerSync(worker, self.index, self.guesses, self.limits, self.stats)

    def remove_worker(self, worker: str) -> None:
        """Forget a worker and what it holds, at once; `KeyError` if it is not known."""
        self._workers.pop(worker).close()
        self._busy.pop(worker, None)
        self.index.remove_worker(worker)
        self.guesses.deny(worker)

    def sync(self, worker: str) -> WorkerSync:
        """The sync of a worker; `KeyError` if it is not known."""
        return self._workers[worker]

    def receive(self, message: Batch | Snapshot | ReplayEnd, now_s: float) -> None:
        """Take what has arrived from a worker."""
        sync = self._workers.get(message.worker)
        if sync is None:
            self.stats.num_unknown_workers += 1
            return
        sync.receive(message, now_s)
        self._note(sync)

    def work(self, max_entries: int = PIECE_ENTRIES) -> bool:
        """Do about `max_entries` of loading, applying and sweeping; False if there was nothing to do.

        A batch is applied as a whole. Ended holdings are swept first, so that few of their entries wait.
        """
        num_done = self.index.sweep(max_entries)
        while self._busy and num_done < max_entries:
            sync = next(iter(self._busy.values()))
            num_done += sync.work(max_entries - num_done)
            self._note(sync)
        return num_done > 0

    def settle(self) -> None:
        """Work until there is nothing to do."""
        while self.work():
            pass

    def requests(self, now_s: float) -> list[SnapshotRequest]:
        """Requests to make of workers now; they count as made."""
        made = (sync.request(now_s) for sync in self._workers.values())
        return [request for request in made if request is not None]

    def expect(self, worker: str, chain: Chain, index: int, now_s: float) -> bool:
        """Guess that a worker that got a request will keep a state after block `index` of its chain.

        Returns whether the guess is new: then it is taken back if the worker does not serve the request.
        """
        if worker not in self._workers:
            raise KeyError(worker)
        if not 0 <= index < len(chain.hashes):
            raise ValueError(f"index must be below {len(chain.hashes)}, the blocks of the chain, got {index}")
        return self.guesses.make(worker, chain, index, now_s)

    def hits(self, chain: Chain, now_s: float) -> dict[str, Hit]:
        """Look up what each worker has of a chain or will soon have; workers that have nothing are left out."""
        self.guesses.expire(now_s)
        hits = self.index.hits(chain)
        for index, worker in self.guesses.on_chain(chain):
            num_tokens = (index + 1) * self.index.block_tokens
            known = hits.get(worker, NO_HIT)
            hits[worker] = Hit(max(num_tokens, known.num_tokens), max(num_tokens, known.num_kv_tokens))
        return hits

    def num_stored_tokens(self, chain: Chain, store: int) -> int:
        """Tokens of a chain up to the deepest state that a store has, whichever worker put it there."""
        return max((hit.num_tokens for hit in self.index.hits(chain.within(store)).values()), default=0)

    def _note(self, sync: WorkerSync) -> None:
        if sync.is_idle:
            self._busy.pop(sync.worker, None)
        else:
            self._busy[sync.worker] = sync
