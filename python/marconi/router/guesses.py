"""Guesses: what a worker will hold once it has served what was just routed to it, until its own events say so.

Between the routing of a request and the event that its state is kept lie a queue, a prefill and a batch of events: long
enough for the next turn, or for a hundred requests with the same document. A guess says that a worker will keep a state
after a block, and hold all KV before it. It is keyed by the last whole block of a prompt, while the state stands at an
exact token, mostly in the block after it. It ends

    confirmed    once the worker publishes KV of that block or of the next one. KV is held as long as a state at or
                 beyond it, whose place the index then knows
    expired      `max_age_s` after it was made, or as the oldest of too many
    denied       by a snapshot that arrived later and does not have it, or with the worker or its epoch
    taken back   where the worker did not serve the request after all

Owner: `Fleet`.
"""

import math
from collections.abc import Iterator
from operator import itemgetter

from marconi.events.base import Namespace
from marconi.router.index import Chain

_Key = tuple[str, Namespace, int]
"""Worker, namespace, hash."""


class Guesses:
    """The guesses about all workers."""

    def __init__(self, max_age_s: float, max_guesses: int) -> None:
        self.fates = dict.fromkeys(("made", "confirmed", "expired", "denied", "taken_back"), 0)
        """Guesses that were made, and those of them that have ended, by what ended them."""
        self._max_age_s = max_age_s
        self._max_guesses = max_guesses
        self._made_s: dict[_Key, float] = {}
        """The oldest first."""
        self._of: dict[str, dict[_Key, None]] = {}
        """The guesses of each worker that has any."""
        self._at: dict[Namespace, dict[int, tuple[int, dict[str, None]]]] = {}
        """Namespace -> hash -> index in the chain, workers."""

    def __len__(self) -> int:
        return len(self._made_s)

    def make(self, worker: str, chain: Chain, index: int, now_s: float) -> bool:
        """Guess a state after block `index` of the chain, a valid index; False if that was guessed already."""
        block_hash = chain.hashes[index]
        key = (worker, chain.namespace, block_hash)
        is_new = self._made_s.pop(key, None) is None
        self.fates["made"] += is_new
        self._made_s[key] = now_s
        self._of.setdefault(worker, {})[key] = None
        self._at.setdefault(chain.namespace, {}).setdefault(block_hash, (index, {}))[1][worker] = None
        while len(self._made_s) > self._max_guesses:
            self._end(next(iter(self._made_s)), "expired")
        return is_new

    def has(self, worker: str, chain: Chain, index: int) -> bool:
        """True if a state after block `index` of the chain is guessed."""
        return (worker, chain.namespace, chain.hashes[index]) in self._made_s

    def take_back(self, worker: str, chain: Chain, index: int) -> None:
        """End a guess, if there is one, whose request was not served."""
        self._end((worker, chain.namespace, chain.hashes[index]), "taken_back")

    def confirm(self, worker: str, namespace: Namespace, block_hash: int) -> None:
        """End a guess, if there is one, that the worker has confirmed."""
        self._end((worker, namespace, block_hash), "confirmed")

    def expire(self, now_s: float) -> None:
        """Drop guesses that are too old."""
        while self._made_s:
            key, made_s = next(iter(self._made_s.items()))
            if now_s - made_s < self._max_age_s:
                return
            self._end(key, "expired")

    def deny(self, worker: str, made_before_s: float = math.inf) -> None:
        """Drop the guesses about a worker that were made until a time."""
        for namespace, block_hash in self.of_worker(worker, made_before_s):
            self._end((worker, namespace, block_hash), "denied")

    def of_worker(self, worker: str, made_before_s: float) -> list[tuple[Namespace, int]]:
        """Namespace and hash of each guess about a worker that was made until a time."""
        return [(key[1], key[2]) for key in self._of.get(worker, ()) if self._made_s[key] <= made_before_s]

    def on_chain(self, chain: Chain) -> Iterator[tuple[int, str]]:
        """`(index, worker)` of the guesses on a chain, by rising index."""
        guessed, hashes = self._at.get(chain.namespace), chain.hashes
        if guessed is None:
            return
        # A hash covers all blocks before it, so it stands at one index only: few guesses are looked up there, since
        # the hashes of a long prompt are many.
        if len(guessed) < len(hashes):
            found = (each for key, each in guessed.items() if each[0] < len(hashes) and hashes[each[0]] == key)
            on_chain = sorted(found, key=itemgetter(0))
        else:
            on_chain = [guessed[key] for key in hashes if key in guessed]
        for index, workers in on_chain:
            for worker in workers:
                yield index, worker

    def _end(self, key: _Key, fate: str) -> None:
        """End a guess, if there is one."""
        if self._made_s.pop(key, None) is None:
            return
        self.fates[fate] += 1
        worker, namespace, block_hash = key
        del self._of[worker][key]
        if not self._of[worker]:
            del self._of[worker]
        guessed = self._at[namespace]
        del guessed[block_hash][1][worker]
        if not guessed[block_hash][1]:
            del guessed[block_hash]
        if not guessed:
            del self._at[namespace]
