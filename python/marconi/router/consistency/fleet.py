"""A fleet as its workers tell of it, over a network that loses, repeats and reorders.

Fast path: batches of events, applied in the order of their sequence numbers, each once. A gap holds back what comes
after it and is asked for again (`missing`); until it is closed the worker's view is doubtful. Slow path: a snapshot of
everything that a worker holds replaces what is known of this worker, closes every gap before it, and needs nothing to
have arrived; in pieces (`work`), while what comes in meanwhile waits. So whatever the network did, the index is what
the workers hold as soon as one snapshot of each and the batches after it have arrived.

A higher epoch is a restart: what is known of the earlier life is answered for no more from that moment on, and its
late batches are dropped. Time is passed in, in seconds of any clock that does not go back. One thread.
"""

from marconi.router.consistency.base import Counters, Limits, Missing
from marconi.router.consistency.guesses import Guesses
from marconi.router.consistency.view import View
from marconi.router.events.base import Batch, Cleared, Event, Snapshot, StateStored
from marconi.router.index.base import NO_HIT, Chain, Hit
from marconi.router.index.fleet_index import FleetIndex

PIECE_ENTRIES = 256


class Fleet:
    """Receives what workers send and answers who has what of a request; see the module."""

    def __init__(self, index: FleetIndex, limits: Limits | None = None) -> None:
        self.index = index
        self.limits = Limits() if limits is None else limits
        self.counters = Counters()
        self.guesses = Guesses(self.limits, self.counters)
        self._views: dict[str, View] = {}
        self._busy: dict[str, None] = {}

    def add_worker(self, worker: str) -> None:
        """Listen to a worker; `ValueError` if it is known."""
        self.index.add_worker(worker)
        self._views[worker] = View()

    def remove_worker(self, worker: str) -> None:
        """Forget a worker and what it holds, at once; `KeyError` if it is not known."""
        self.index.remove_worker(worker)
        del self._views[worker]
        self._busy.pop(worker, None)
        self.guesses.deny(worker, float("inf"))

    def is_doubtful(self, worker: str) -> bool:
        """Whether anything of a worker is known to be missing, or nothing was heard of it yet."""
        view = self._views[worker]
        return not view.is_begun or view.has_gap

    def heard_s(self, worker: str) -> float | None:
        """When anything of the worker's present life last arrived; None if nothing did."""
        view = self._views[worker]
        return view.heard_s if view.is_begun else None

    def receive(self, message: Batch | Snapshot, now_s: float) -> None:
        """What arrived from a worker."""
        view = self._follow(message, now_s)
        if view is None:
            return
        if isinstance(message, Snapshot):
            self._receive_snapshot(view, message, now_s)
        else:
            self._receive_batch(view, message)
        if not view.is_idle:
            self._busy[message.worker] = None

    def work(self, max_entries: int = PIECE_ENTRIES) -> bool:
        """Go on by about so many entries with what is under way; False if there was nothing to do.

        A batch is applied as a whole.
        """
        num_left = max_entries
        did_something = False
        while self._busy and num_left > 0:
            worker = next(iter(self._busy))
            view = self._views[worker]
            num_left -= self._go_on(worker, view, num_left)
            did_something = True
            del self._busy[worker]
            if not view.is_idle:
                self._busy[worker] = None  # behind the others: all get on
        if num_left > 0:
            did_something |= self.index.sweep(num_left) > 0
        return did_something

    def settle(self) -> None:
        """Work until there is nothing to do."""
        while self.work():
            pass

    def missing(self, now_s: float) -> list[Missing]:
        """What to ask workers for again; the same not before `retry_s` is over."""
        asks = []
        for worker, view in self._views.items():
            gap = view.missing
            if gap is None or gap[1] - gap[0] >= self.limits.max_replayed_batches:
                continue
            if view.asked_s is None or now_s - view.asked_s >= self.limits.retry_s:
                view.asked_s = now_s
                asks.append(Missing(worker, view.epoch, *gap))
        return asks

    def expect(self, worker: str, chain: Chain, index: int, now_s: float) -> bool:
        """A request was routed to a worker, which will hold a state after block `index` of the chain.

        Whether that was not expected before, and so is to be taken back if the worker does not serve the request.
        """
        if worker not in self._views:
            raise KeyError(worker)
        if not 0 <= index < len(chain.hashes):
            raise ValueError(f"index={index}: the chain has {len(chain.hashes)} blocks")
        return self.guesses.make(worker, chain, index, now_s)

    def hits(self, chain: Chain, now_s: float) -> dict[str, Hit]:
        """What each worker has of a chain, or is about to have; workers that have nothing are left out."""
        self.guesses.expire(now_s)
        hits = self.index.hits(chain)
        for index, worker in self.guesses.on(chain):
            num_tokens = (index + 1) * self.index.block_tokens
            known = hits.get(worker, NO_HIT)
            hits[worker] = Hit(max(num_tokens, known.num_tokens), max(num_tokens, known.num_kv_tokens))
        return hits

    def _follow(self, message: Batch | Snapshot, now_s: float) -> View | None:
        """The view of the message's life of its worker; None if it is to be dropped."""
        view = self._views.get(message.worker)
        if view is None:
            self.counters.num_unknown_workers += 1
            return None
        lowest = -1 if isinstance(message, Snapshot) else 0
        if message.epoch < 0 or message.sequence < lowest:
            self.counters.num_malformed += 1
            return None
        if view.is_begun and message.epoch < view.epoch:
            self.counters.num_late += 1
            return None
        if not view.is_begun or message.epoch > view.epoch:
            if view.is_begun:
                self.counters.num_restarts += 1
                self.index.clear(message.worker)
                self.guesses.deny(message.worker, float("inf"))
                self._busy.pop(message.worker, None)
            view.begin(message.epoch)
        view.heard_s = now_s
        return view

    def _receive_batch(self, view: View, batch: Batch) -> None:
        if batch.sequence < view.next or batch.sequence in view.waiting:
            self.counters.num_duplicates += 1
        elif batch.sequence == view.next and view.applying is None:
            self._apply(view, batch)
        elif len(view.waiting) >= self.limits.max_waiting_batches:
            self.counters.num_overflows += 1
        else:
            had_gap = view.has_gap
            view.waiting[batch.sequence] = batch
            self.counters.num_gaps += view.has_gap and not had_gap

    def _receive_snapshot(self, view: View, snapshot: Snapshot, now_s: float) -> None:
        if snapshot.number <= view.last_number or snapshot.sequence < view.next - 1:
            self.counters.num_stale_snapshots += 1
            return
        view.last_number = snapshot.number
        if view.applying is None:
            self._begin(view, snapshot, now_s)
        else:
            view.next_snapshot = snapshot, now_s

    def _begin(self, view: View, snapshot: Snapshot, arrived_s: float) -> None:
        view.applying, view.arrived_s = snapshot, arrived_s
        view.replacement = self.index.replace(snapshot.worker, snapshot.events)

    def _go_on(self, worker: str, view: View, max_entries: int) -> int:
        """Work on one view; returns how many entries that were, 1 or more."""
        if view.replacement is not None and view.applying is not None:
            num_done = view.replacement.step(max_entries)
            if view.replacement.is_done:
                self._finish(view, view.applying)
            return max(1, num_done)
        num_done = 0
        while num_done < max_entries and (batch := view.waiting.pop(view.next, None)) is not None:
            self._apply(view, batch)
            num_done += len(batch.events)
        return max(1, num_done)

    def _finish(self, view: View, snapshot: Snapshot) -> None:
        self.counters.num_snapshots += 1
        view.replacement = view.applying = view.asked_s = None
        view.next = snapshot.sequence + 1
        for sequence in [sequence for sequence in view.waiting if sequence < view.next]:
            del view.waiting[sequence]
        for namespace, block_hash in self.guesses.of(snapshot.worker):
            if self.index.has_state(snapshot.worker, namespace, block_hash):
                self.guesses.confirm(snapshot.worker, namespace, block_hash)
        self.guesses.deny(snapshot.worker, view.arrived_s - self.limits.guess_grace_s)
        if view.next_snapshot is not None:
            following, view.next_snapshot = view.next_snapshot, None
            self._begin(view, *following)

    def _apply(self, view: View, batch: Batch) -> None:
        self._confirm(batch.worker, batch.events)
        self.index.apply(batch.worker, batch.events)
        view.next = batch.sequence + 1
        if not view.has_gap:
            view.asked_s = None

    def _confirm(self, worker: str, events: tuple[Event, ...]) -> None:
        if not len(self.guesses):
            return
        for event in events:
            if isinstance(event, StateStored):
                self.guesses.confirm(worker, event.namespace, event.block_hash)
            elif isinstance(event, Cleared):
                self.guesses.deny(worker, float("inf"))
