"""The states of both tiers on their way to the store, the most valuable first, a few at a time.

A state that the host has no copy of is copied first. Where that takes the place of others, they are written before.

Owner: the scheduler's thread, between two steps or as it ends.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

from marconi.engine.host.cache import TieredRadixCache
from marconi.policy.base import Need
from marconi.policy.store import StoreBehind, most_valuable_first
from marconi.tree import HostCopy, Node

_NUM_AT_ONCE: Final = 4
"""States that are being copied and written at a time."""


class Saving:
    """The states of both tiers on their way to the store: the most valuable first, a few at a time."""

    def __init__(self, cache: TieredRadixCache, behind: StoreBehind, write: Callable[[HostCopy], None]) -> None:
        """`write` begins to write a copy."""
        core, tier = cache.tree_core, cache.tree_core.tier
        assert tier is not None
        self._cache, self._tier = cache, tier
        self._behind, self._write_copy = behind, write
        held = most_valuable_first(core.hybrid, tier.eviction, cache.clock())
        held = [node for node in held if node.has_copy or tier.times.worth_of(node, Need.KV) > 0]
        self.num_held = len(held)
        """But those that the host would not take."""
        self._left = deque(held)
        self._begun: list[Node] = []
        """Those that are being copied to the host, or written."""
        self._tried: set[Node] = set()
        self.num_written = 0
        """Those that the store has."""

    def advance(self) -> bool:
        """Begin to write more; False once all are written that can be."""
        begun, self._begun = self._begun, []
        for node in begun:
            self._write(node)
        while len(self._begun) < _NUM_AT_ONCE and self._left:
            node = self._left[0]
            if node.has_state and not node.has_copy:
                # What gives way to it on the host is written before.
                for copy in self._behind.choose(self._cache.clock()):
                    self._write_copy(copy)
                if self._behind.being_written and not self._tier.has_room(_num_new_tokens(node)):
                    break
                if self._tier.take(node, self._cache.clock()):
                    self._cache._begin_copy(node)
            self._left.popleft()
            self._write(node)
        return bool(self._begun or self._left)

    def _write(self, node: Node) -> None:
        """Write a copy once it is there; the host may have dropped one that was written."""
        copy = node.host_copy
        if copy is None:
            return
        if copy.stored_as is not None:
            self.num_written += 1
        elif not copy.is_held:
            return
        elif copy in self._behind.being_written or node in self._tier.being_copied:
            self._begun.append(node)
        elif node not in self._tried:
            self._tried.add(node)
            self._write_copy(copy)
            self._begun.append(node)


def _num_new_tokens(node: Node) -> int:
    """Tokens that the host has to take with a copy of `node`."""
    above = node
    while above.parent is not None and not above.is_hosted:
        above = above.parent
    return node.depth - above.depth
