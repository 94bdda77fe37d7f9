"""States that outlive a server: which of them are saved when it stops, in which order, and for how long.

The eviction order says what is worth keeping, so no second ranking is needed. At a clean stop it runs to its end,
always for the kind of memory that takes more bytes, and what is evicted last is saved first. A state is saved with the
KV that its eviction frees, beyond `start` tokens:

    invariant   the KV before `start` is saved with states that precede it

All KV of its path that its eviction left was freed by later evictions. So any first part of the states can be loaded,
in order, and saving may end anywhere: when its time is over (`SaveBudget`), or when the next server's pools are full.

A cache's time stands still while no server runs. Loaded states are as old, relative to each other and to those of the
new server, as they were (`HybridCache.adopt`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from marconi.policy.base import Costs, Need
from marconi.policy.hybrid_cache import HybridCache
from marconi.tree import Node, SavedFacts

SAVE_S: Final = 10.0
"""SGLang kills a scheduler that has not ended 15 s after it was asked to."""
FIRST_BYTES_PER_S: Final = 250e6
"""Assumed speed of the first write."""


class SavedState(NamedTuple):
    """A state and its path. Depths are in tokens."""

    namespace: int
    path: bytes
    """Packed ids up to the state."""
    depth: int
    start: int
    """Depth from which on its KV is saved with it."""
    facts: SavedFacts


def least_valuable_first(cache: HybridCache, costs: Costs, now_s: float) -> Iterator[tuple[Node, SavedState]]:
    """Evict all states of `cache` that are not in use; yields each with its node before it is evicted."""
    tree = cache.tree
    namespaces = {root: namespace for namespace, root in tree.roots.items()}
    while True:
        needs = [Need.STATE, Need.KV]
        if tree.num_tokens * costs.kv_bytes_per_token > tree.num_states * costs.state_bytes:
            needs.reverse()
        for need in needs:
            victim = cache.order.victim(need, now_s)
            if victim is not None:
                break
        else:
            return
        assert isinstance(victim, Node)
        path, root = _path_of(victim)
        start = victim.depth - victim.freed_tokens
        yield victim, SavedState(namespaces[root], path, victim.depth, start, SavedFacts.of(victim, now_s))
        cache.evict_node(victim, need, now_s)


def _path_of(node: Node) -> tuple[bytes, Node]:
    """The packed ids from the root to the end of `node`, and the root."""
    keys: list[bytes] = []
    above = node
    while above.parent is not None:
        keys.append(above.key)
        above = above.parent
    return b"".join(reversed(keys)), above


@dataclass(slots=True)
class SaveBudget:
    """Whether there is time to write one more state, by how long those before it took."""

    deadline_s: float
    num_bytes: int = 0
    """Written so far."""
    spent_s: float = 0.0

    def has_time(self, num_bytes: int, now_s: float) -> bool:
        """True if `num_bytes` more are likely to be written by the deadline."""
        speed = self.num_bytes / self.spent_s if self.num_bytes and self.spent_s else FIRST_BYTES_PER_S
        return now_s + num_bytes / speed <= self.deadline_s

    def written(self, num_bytes: int, took_s: float) -> None:
        """`num_bytes` were written in `took_s` seconds."""
        self.num_bytes += num_bytes
        self.spent_s += took_s
