"""A fleet as its workers' events describe it: an index in sync with each of them, and guesses of what comes next.

    receive    a worker's batch or snapshot has arrived         batches whose turn it is are applied at once
    work       load snapshots, apply what waited, sweep         a piece at a time, with decisions in between
    requests   what to request of workers now                   when anything has arrived, and now and then
    hits       what each worker has of a prompt                 by the index, or by a guess

Repairs are `worker_sync.py`'s. Time is passed in, in seconds of any clock that does not go back. One thread.
"""

from marconi.events.base import Batch, ReplayEnd, Snapshot
from marconi.router.index import NO_HIT, Chain, FleetIndex, Hit
from marconi.router.sync.base import Request, State, SyncLimits, SyncStats
from marconi.router.sync.guesses import Guesses
from marconi.router.sync.worker_sync import WorkerSync

PIECE_ENTRIES = 256


class Fleet:
    """Receives what workers send and knows who has what of a request; see the module."""

    def __init__(self, index: FleetIndex, limits: SyncLimits | None = None) -> None:
        self.index = index
        self.limits = SyncLimits() if limits is None else limits
        self.stats = SyncStats()
        self.guesses = Guesses(self.limits, self.stats)
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
        self.guesses.deny(worker, float("inf"))

    def state(self, worker: str) -> State:
        """How much of what a worker holds is known."""
        return self._workers[worker].state

    def received_s(self, worker: str) -> float | None:
        """When anything of the worker's present epoch last arrived; None if nothing did."""
        return self._workers[worker].received_s

    def receive(self, message: Batch | Snapshot | ReplayEnd, now_s: float) -> None:
        """Take what has arrived from a worker."""
        sync = self._workers.get(message.worker)
        if sync is None:
            self.stats.num_unknown_workers += 1
            return
        sync.receive(message, now_s)
        self._note(sync)

    def work(self, max_entries: int = PIECE_ENTRIES) -> bool:
        """Go on by about so many entries with what is under way; False if there was nothing to do.

        A batch is applied as a whole. What has ended is swept first, so that little of it waits.
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

    def requests(self, now_s: float) -> list[Request]:
        """Requests to make of workers now; they count as made."""
        made = (sync.request(now_s) for sync in self._workers.values())
        return [request for request in made if request is not None]

    def expect(self, worker: str, chain: Chain, index: int, now_s: float) -> bool:
        """Guess that a worker, which got a request, will keep a state after block `index` of its chain.

        Whether that is a new guess, to be taken back if the worker does not serve the request.
        """
        if worker not in self._workers:
            raise KeyError(worker)
        if not 0 <= index < len(chain.hashes):
            raise ValueError(f"index must be below {len(chain.hashes)}, the blocks of the chain, got {index}")
        return self.guesses.make(worker, chain, index, now_s)

    def hits(self, chain: Chain, now_s: float) -> dict[str, Hit]:
        """Look up what each worker has of a chain, or is about to have; workers that have nothing are left out."""
        self.guesses.expire(now_s)
        hits = self.index.hits(chain)
        for index, worker in self.guesses.on_chain(chain):
            num_tokens = (index + 1) * self.index.block_tokens
            known = hits.get(worker, NO_HIT)
            hits[worker] = Hit(max(num_tokens, known.num_tokens), max(num_tokens, known.num_kv_tokens))
        return hits

    def _note(self, sync: WorkerSync) -> None:
        if sync.is_idle:
            self._busy.pop(sync.worker, None)
        else:
            self._busy[sync.worker] = sync
