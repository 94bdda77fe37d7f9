"""States that outlive a server: which of them are saved when it stops or is asked to, in which order, and for how long.

The eviction order says what is worth keeping, so no second ranking is needed. It is read as it stands and backwards,
what is in use first, and nothing is evicted. With a host tier what the device would evict last comes first, then the
copies by the host's own order, at last what the device is about to evict without one. What a client or the end of a
session has demoted is not saved: it would come back as valuable as the rest. A state is saved with the KV of its path
that was not saved before, beyond `start` tokens:

    invariant   the KV before `start` is saved with states that precede it

So any first part of the states can be loaded, in order, and saving may end anywhere: when its time is over
(`SaveBudget`), or when the next server's pools are full. A state that is evicted while others are saved is left out,
and those that follow bring what it would have brought (`SavedPaths`).

A cache's time stands still while no server runs. Loaded states are as old, relative to each other and to those of the
new server, as they were (`HybridCache.adopt`).
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from marconi.policy.base import NodeView
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.retention import Retention
from marconi.tree import HostCopy, Node, RadixTree, SavedFacts
from marconi.tree.node import ID_BYTES

SAVE_S: Final = 10.0
"""SGLang kills a scheduler that has not ended 15 s after it was asked to."""
FIRST_BYTES_PER_S: Final = 250e6
"""Assumed speed of the first write."""


class Ranked(NamedTuple):
    """A state to save, and its facts when it was ranked."""

    node: Node
    facts: SavedFacts


class SavedState(NamedTuple):
    """A state and its path. Depths are in tokens."""

    namespace: int
    path: bytes
    """Packed ids up to the state."""
    depth: int
    start: int
    """Depth from which on its KV is saved with it."""
    facts: SavedFacts


def most_valuable_first(cache: HybridCache, now_s: float, host: Order | None = None) -> list[Ranked]:
    """The states of `cache` that nobody has demoted: those in use, then the others by decreasing worth.

    `host` ranks the copies on the host, where there are any. Changes nothing.
    """
    wishes = cache.retention or Retention()
    device, copies, rest = list[NodeView](), list[NodeView](), list[NodeView]()
    for root in cache.tree.roots.values():
        for node in root.walk():
            stays = node.has_state and (host is None or node.leaving is None)
            if wishes.is_demoted(node):
                continue
            if stays:
                device.append(node)
            elif node.has_copy and node.host_copy is not None:
                copies.append(node.host_copy)
            elif node.has_state:
                rest.append(node)
    ranked = _falling(device, cache.order, now_s)
    if host is not None:
        ranked += [*_falling(copies, host, now_s), *_falling(rest, cache.order, now_s)]
    nodes = (each.node if isinstance(each, HostCopy) else each for each in ranked)
    return [Ranked(node, SavedFacts.of(node, now_s)) for node in nodes if isinstance(node, Node)]


def _falling(views: list[NodeView], order: Order, now_s: float) -> list[NodeView]:
    """`views` by decreasing worth; those in use have no place, and come first."""
    if not views:
        return []
    keys = order.worths(views, now_s)
    keys = np.where(np.isnan(keys[:, :1]), np.inf, keys)
    serials = np.array([view.serial for view in views], np.float64)
    rising = np.lexsort((serials, *keys.T[::-1]))
    return [views[at] for at in rising[::-1].tolist()]


class SavedPaths:
    """The paths whose KV is saved already."""

    __slots__ = ("_index", "_namespaces")

    def __init__(self, tree: RadixTree) -> None:
        """None of those of `tree`."""
        self._index = RadixTree(tree.unit_tokens, ids_per_unit=tree.unit_bytes // ID_BYTES)
        self._namespaces = {root: namespace for namespace, root in tree.roots.items()}

    def add(self, ranked: Ranked) -> SavedState:
        """Save a state that the tree still holds, and all of its path."""
        node, facts = ranked
        path, root = _path_of(node)
        namespace = self._namespaces[root]
        start = self._index.match(path, node.depth, namespace).num_live_tokens
        self._index.insert(path, [node.depth], namespace)
        return SavedState(namespace, path, node.depth, start, facts)


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
