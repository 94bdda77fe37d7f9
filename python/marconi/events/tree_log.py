"""A log of what changes in a tree: an append a change, by reference, and nothing else on the tree's thread.

Who owns the tree appends; `mirror.py` takes from the other end, on a thread of its own. Nodes go by their serials, 0
for a root. Keys are the tree's own, and it puts a new one in place of an old one rather than changing it.

A log that is closed, because its reader is gone or `MAX_CHANGES` behind, keeps nothing from then on. A change that is
missing cannot be made up for, so it stays closed.
"""

from collections import deque
from typing import Final, NamedTuple, TypeAlias

from marconi.tree import Node

ROOT = 0
MAX_CHANGES: Final = 1 << 18
"""That wait: minutes of a busy server."""


class Tenant(NamedTuple):
    """The owner of a namespace: an adapter and a tenant's salt."""

    extra_key: str | None = None
    cache_salt: str | None = None


class Held(NamedTuple):
    """The KV of a node's span is held."""

    node: int
    parent: int
    key: bytes
    tenant: Tenant


class Dropped(NamedTuple):
    """The KV of a node's span is held no more."""

    node: int


class KeptState(NamedTuple):
    """The state at a node's end is kept."""

    node: int


class DroppedState(NamedTuple):
    """The state at a node's end is kept no more."""

    node: int


class Split(NamedTuple):
    """The span of `lower` begins with what is `upper`'s now."""

    upper: int
    lower: int
    upper_key: bytes
    lower_key: bytes


class Joined(NamedTuple):
    """The span of `lower` begins with what was `upper`'s, which is gone."""

    upper: int
    lower: int
    key: bytes


class Flushed(NamedTuple):
    """Nothing is held."""


Change: TypeAlias = Held | Dropped | KeptState | DroppedState | Split | Joined | Flushed


class TreeLog:
    """A `marconi.tree.memory.Memory` that logs. Whoever holds states logs when one is kept."""

    def __init__(self) -> None:
        self.changes: deque[Change] = deque()
        self.tenant = Tenant()
        """The owner of the path that is inserted next."""
        self.is_closed = False

    def close(self) -> None:
        """Forget what waits, and log nothing more. From any thread."""
        self.is_closed = True
        # Into a deque without room, appending is nothing.
        self.changes = deque(maxlen=0)

    def held(self, node: Node) -> None:
        """Log that the KV of a node's span is held."""
        # Every other change is of a node that was held before, so this one bounds them all.
        if len(self.changes) >= MAX_CHANGES:
            self.close()
        parent = node.parent
        assert parent is not None
        above = ROOT if parent.parent is None else parent.serial
        self.changes.append(Held(node.serial, above, node.key, self.tenant))

    def dropped(self, node: Node) -> None:
        """Log that it is held no more."""
        self.changes.append(Dropped(node.serial))

    def kept_state(self, node: Node) -> None:
        """Log that the state at a node's end is kept."""
        self.changes.append(KeptState(node.serial))

    def dropped_state(self, node: Node) -> None:
        """Log that it is kept no more."""
        self.changes.append(DroppedState(node.serial))

    def split(self, upper: Node, lower: Node) -> None:
        """Log that a span was split."""
        self.changes.append(Split(upper.serial, lower.serial, upper.key, lower.key))

    def joined(self, upper: Node, lower: Node) -> None:
        """Log that two spans were joined."""
        self.changes.append(Joined(upper.serial, lower.serial, lower.key))

    def flushed(self) -> None:
        """Log that nothing is held."""
        self.changes.append(Flushed())
