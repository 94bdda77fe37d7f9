"""A log of a tree's changes: an append a change, by reference, and nothing else on the tree's thread.

The tree's owner appends; `mirror.py` takes from the other end, on a thread of its own. Nodes are named by their
serials, 0 for a root. Keys are the tree's own, which replaces them rather than changing them.

A log that is closed, because its reader has ended or is `MAX_CHANGES` behind, keeps nothing from then on. A missing
change cannot be recovered, so it stays closed. A second reader has a log of its own, which the first one's passes all
changes on to.
"""

from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar, Final, NamedTuple, TypeAlias

from marconi.tree import Node

ROOT = 0
MAX_CHANGES: Final = 1 << 18
"""The most changes that wait for a reader: minutes of a busy server."""


class Tenant(NamedTuple):
    """The owner of a namespace: an adapter and a tenant's salt, on the device or in a store."""

    extra_key: str | None = None
    cache_salt: str | None = None
    store: int = 0
    """0 for the device."""


class KeptKv(NamedTuple):
    """The KV of a node's span was stored."""

    node: int
    parent: int
    key: bytes
    tenant: Tenant


class DroppedKv(NamedTuple):
    """The KV of a node's span was dropped."""

    node: int


class KeptState(NamedTuple):
    """The state at a node's end was stored."""

    node: int


class DroppedState(NamedTuple):
    """The state at a node's end was dropped."""

    node: int


class Split(NamedTuple):
    """A span was split: its first tokens belong to `upper` now, the rest to `lower`."""

    upper: int
    lower: int
    upper_key: bytes
    lower_key: bytes


class Joined(NamedTuple):
    """Two spans were joined: `lower` begins with the tokens of `upper`, which exists no longer."""

    upper: int
    lower: int
    key: bytes


class Flushed(NamedTuple):
    """The whole tree was dropped."""


Change: TypeAlias = KeptKv | DroppedKv | KeptState | DroppedState | Split | Joined | Flushed


class ChangeLog(ABC):
    """A `marconi.tree.memory.Memory` that logs each change; the owner of states logs when one is kept."""

    tenant: Tenant
    """The owner of the path that is inserted next."""
    sign: ClassVar[int] = 1
    """A node's serial times this names it."""

    @abstractmethod
    def log(self, change: Change) -> None:
        """Log a change."""

    def held(self, node: Node) -> None:
        """Log that the KV of a node's span is held."""
        parent = node.parent
        assert parent is not None
        above = ROOT if parent.parent is None else self.sign * parent.serial
        self.log(KeptKv(self.sign * node.serial, above, node.key, self.tenant))

    def dropped(self, node: Node) -> None:
        """Log that the KV of a node's span is dropped."""
        self.log(DroppedKv(self.sign * node.serial))

    def kept_state(self, node: Node) -> None:
        """Log that the state at a node's end is kept."""
        self.log(KeptState(self.sign * node.serial))

    def dropped_state(self, node: Node) -> None:
        """Log that the state at a node's end is dropped."""
        self.log(DroppedState(self.sign * node.serial))

    def split(self, upper: Node, lower: Node) -> None:
        """Log that a span was split."""
        self.log(Split(self.sign * upper.serial, self.sign * lower.serial, upper.key, lower.key))

    def joined(self, upper: Node, lower: Node) -> None:
        """Log that two spans were joined."""
        self.log(Joined(self.sign * upper.serial, self.sign * lower.serial, lower.key))


class TreeLog(ChangeLog):
    """The log of a server's tree."""

    def __init__(self, also: "TreeLog | None" = None) -> None:
        """A log whose changes `also` gets, too."""
        self.changes: deque[Change] = deque()
        self.tenant = Tenant()
        self.is_closed = False
        self._also = also

    def close(self) -> None:
        """Forget the changes that wait, and log nothing more; may be called from any thread."""
        self.is_closed = True
        # Into a deque without room, appending is nothing.
        self.changes = deque(maxlen=0)

    def flushed(self) -> None:
        """Log that the whole tree is dropped."""
        self.log(Flushed())

    def own(self, change: Change) -> None:
        """Log a change that only this log's reader gets."""
        if len(self.changes) >= MAX_CHANGES:
            self.close()
        self.changes.append(change)

    def log(self, change: Change) -> None:
        """Log a change that the readers of both logs get."""
        self.own(change)
        if self._also is not None:
            self._also.log(change)
