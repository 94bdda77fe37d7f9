"""The queue of one cache: the requests that wait, in the index of their prompts and in the cache's order of states.

    come       a request is indexed beside those that wait, and the state that it would start from is evicted last
    rematch    it would start from another state by now
    go         it waits no longer

Invariant: whoever is in the index (`policy/waiting.py`) is awaited by the cache (`HybridCache.queue`), and goes from
both at once. Requests are known by any hashable key. Owner: whoever owns the queue, a scheduler or a replay.
"""

from collections.abc import Collection, Hashable, Iterable
from typing import TypeVar

from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Request
from marconi.policy.waiting import WaitingPrompts
from marconi.tree import Match
from marconi.tree.node import ID_BYTES

KeyT = TypeVar("KeyT", bound=Hashable)


class Queue:
    """Requests that wait."""

    def __init__(self, hybrid: HybridCache) -> None:
        """Nobody waits for `hybrid` yet."""
        tree = hybrid.tree
        self.prompts = WaitingPrompts(tree.unit_tokens, tree.unit_bytes // ID_BYTES)
        self._hybrid = hybrid

    def come(self, requests: Iterable[tuple[KeyT, Request]]) -> list[KeyT]:
        """Requests wait from now on, each with its key, as far as the index has room; returns the keys of those."""
        prompts, hybrid, came = self.prompts, self._hybrid, []
        for key, request in requests:
            if prompts.is_full:
                break
            prompts.add(key, request)
            came.append((key, hybrid.match(request).checkpoint))
        if came:
            hybrid.queue((), came)
        return [key for key, _ in came]

    def rematch(self, key: Hashable, match: Match) -> bool:
        """The cache has `match` of a request by now; False if it does not wait."""
        if not self._hybrid.awaits(key):
            return False
        self._hybrid.queue((), [(key, match.checkpoint)])
        return True

    def go(self, keys: Collection[Hashable]) -> None:
        """Requests wait no longer."""
        for key in keys:
            self.prompts.remove(key)
        self._hybrid.queue(keys, ())

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless the cache awaits whoever is in the index, and nobody else."""
        self.prompts.check_invariants()
        wrong = self.prompts.keys() ^ self._hybrid.awaiting
        assert not wrong, f"{wrong}: in the index and not awaited, or gone from it"
