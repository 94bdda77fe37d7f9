"""Whether a cache's events leave, with whoever hears them, what its tree holds.

What a listener has after all events so far is compared with a walk over the tree, each path hashed from its start, and
so is what a snapshot says. The blocks and the depths of states are compared, not their number.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias

from marconi.engine.cache.tree_core import namespace_of
from marconi.events.base import Cleared, Event, KvRemoved, KvStored, StateRemoved, StateStored
from marconi.events.hashes import HashSpace
from marconi.events.mirror import Mirror
from marconi.events.tree_log import Tenant
from marconi.tree import Node

BLOCK_TOKENS = 16

Holding: TypeAlias = tuple[set[int], dict[int, int]]
"""Blocks of KV, and the depths of states by the block before them."""


class EventCheck:
    """Hears what `cache`, which notes in a log, tells in blocks of `block_tokens` about the name spaces `names`."""

    def __init__(self, cache: Any, names: Iterable[Tenant], block_tokens: int = BLOCK_TOKENS) -> None:
        self._cache = cache
        self._mirror = Mirror(cache.log, block_tokens)
        self._names = {namespace_of(each.extra_key, each.cache_salt): each for each in names}
        self._block_tokens = block_tokens
        self._heard: Holding = (set(), {})
        self.num_events = 0

    def check(self) -> Holding:
        """What is held now; raises `AssertionError` where events or a snapshot leave something else."""
        for told in self._mirror.drain():
            self.num_events += 1
            hear(self._heard, told.event)
        held = self._held()
        assert self._heard == held, f"events leave {_difference(self._heard, held)}"
        snapshot: Holding = (set(), {})
        for event in self._mirror.held():
            hear(snapshot, event)
        assert snapshot == held, f"a snapshot says {_difference(snapshot, held)}"
        return held

    def _held(self) -> Holding:
        kv: set[int] = set()
        states: dict[int, int] = {}
        core, block = self._cache.tree_core, self._block_tokens
        for namespace, root in core.hybrid.tree.roots.items():
            space = HashSpace.of(None, *self._names[namespace])
            for node in root.walk():
                if node.is_live and node.parent is not None:
                    hashes = [space.hash(each) for each in space.digests(space.start, _path(node), block)]
                    kv.update(hashes[: node.depth // block])
                    if node in core.memory.states:
                        kv.add(hashes[-1])
                        states[hashes[-1]] = node.depth
        return kv, states


def hear(holding: Holding, event: Event) -> None:
    """Add an event to what a listener has; raises `AssertionError` for one that cannot follow."""
    kv, states = holding
    match event:
        case KvStored(hashes):
            assert kv.isdisjoint(hashes), "KV is published twice"
            kv.update(hashes)
        case KvRemoved(hashes):
            assert kv.issuperset(hashes), "KV goes that was not there"
            kv.difference_update(hashes)
        case StateStored(block_hash, depth):
            assert block_hash in kv, "a state without its KV"
            states[block_hash] = depth
        case StateRemoved(block_hash):
            del states[block_hash]
        case Cleared():
            kv.clear()
            states.clear()


def _difference(found: Holding, held: Holding) -> str:
    more, less, states = len(found[0] - held[0]), len(held[0] - found[0]), len(found[1].items() ^ held[1].items())
    return f"{more} blocks more than the tree holds, {less} less, and {states} states more, less or elsewhere"


def _path(node: Node | None) -> bytes:
    key = b""
    while node is not None:
        key, node = node.key + key, node.parent
    return key
