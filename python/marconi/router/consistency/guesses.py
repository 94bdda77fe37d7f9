"""What a worker will hold once it has served what was just routed to it, until it says so itself.

Between the routing of a request and the event that its state is kept lie a queue, a prefill and a batch of events:
long enough for the next turn, or for a hundred requests with the same document. A guess says that a worker will hold a
state after a block, and all KV before it. It ends

    confirmed   by the worker's `StateStored`: from then on the index knows
    expired     `guess_s` after it was made
    denied      by a snapshot that arrived `guess_grace_s` later and does not bring it
    void        with the worker's epoch
    taken back  where the worker did not serve the request after all

Guesses are found as states are in the index, by the block before their segment of the path.
"""

from collections.abc import Iterator

from marconi.router.consistency.base import Counters, Limits
from marconi.router.index.base import Chain
from marconi.router.index.segments import SEGMENT_BLOCKS

_Key = tuple[str, bytes, int]
"""Worker, namespace, hash."""
_Anchor = tuple[bytes, int | None]


class Guesses:
    """Owned by `Fleet`, whose counters it adds to."""

    def __init__(self, limits: Limits, counters: Counters) -> None:
        self._limits = limits
        self._counters = counters
        self._made_s: dict[_Key, tuple[float, _Anchor]] = {}
        """The oldest first."""
        self._of: dict[str, dict[_Key, None]] = {}
        """Of each worker that any is of."""
        self._at: dict[_Anchor, dict[int, tuple[int, dict[str, None]]]] = {}
        """Anchor -> hash -> index in the path, workers."""

    def __len__(self) -> int:
        return len(self._made_s)

    def make(self, worker: str, chain: Chain, index: int, now_s: float) -> bool:
        """The worker will hold a state after block `index` of the chain, a valid index; False if that was guessed."""
        block_hash = chain.hashes[index]
        key = (worker, chain.namespace, block_hash)
        start = index - index % SEGMENT_BLOCKS
        anchor = (chain.namespace, chain.hashes[start - 1] if start else None)
        is_new = self._made_s.pop(key, None) is None
        self._made_s[key] = (now_s, anchor)
        self._of.setdefault(worker, {})[key] = None
        self._at.setdefault(anchor, {}).setdefault(block_hash, (index, {}))[1][worker] = None
        while len(self._made_s) > self._limits.max_guesses:
            self._give_up(next(iter(self._made_s)))
        return is_new

    def take_back(self, worker: str, chain: Chain, index: int) -> None:
        """It will not, by that request."""
        self.confirm(worker, chain.namespace, chain.hashes[index])

    def confirm(self, worker: str, namespace: bytes, block_hash: int) -> None:
        """The worker said so."""
        if (worker, namespace, block_hash) in self._made_s:
            self._end((worker, namespace, block_hash))

    def expire(self, now_s: float) -> None:
        """Give up what is too old."""
        while self._made_s:
            key, (made_s, _) = next(iter(self._made_s.items()))
            if now_s - made_s < self._limits.guess_s:
                return
            self._give_up(key)

    def deny(self, worker: str, made_before_s: float) -> None:
        """Give up what was guessed of a worker before a time, its own clock."""
        for key in [key for key in self._of.get(worker, ()) if self._made_s[key][0] <= made_before_s]:
            self._give_up(key)

    def of(self, worker: str) -> list[tuple[bytes, int]]:
        """Namespace and hash of what is guessed of a worker."""
        return [(namespace, block_hash) for _, namespace, block_hash in self._of.get(worker, ())]

    def on(self, chain: Chain) -> Iterator[tuple[int, str]]:
        """`(index, worker)` of the guesses on a chain."""
        if not self._made_s:
            return
        hashes = chain.hashes
        for start in range(0, len(hashes), SEGMENT_BLOCKS):
            there = self._at.get((chain.namespace, hashes[start - 1] if start else None))
            if there is None:
                continue
            end = min(start + SEGMENT_BLOCKS, len(hashes))
            if len(there) <= end - start:
                for block_hash, (index, workers) in there.items():
                    if index < end and hashes[index] == block_hash:
                        for worker in workers:
                            yield index, worker
            else:
                for index in range(start, end):
                    if hashes[index] in there:
                        for worker in there[hashes[index]][1]:
                            yield index, worker

    def _give_up(self, key: _Key) -> None:
        self._counters.num_guesses_given_up += 1
        self._end(key)

    def _end(self, key: _Key) -> None:
        worker, _, block_hash = key
        _, anchor = self._made_s.pop(key)
        own = self._of[worker]
        del own[key]
        if not own:
            del self._of[worker]
        there = self._at[anchor]
        workers = there[block_hash][1]
        del workers[worker]
        if not workers:
            del there[block_hash]
            if not there:
                del self._at[anchor]
