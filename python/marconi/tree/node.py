"""A node: the span of tokens between its parent's depth and its own, and perhaps the state at its end.

A node is *live* when the KV of its span is held, else it is a *ghost*: an outline that remembers that a prefix was
seen. Only the tree changes a node's structure; the two times belong to the cache that drives the tree.

A span is packed ids: comparing prefixes is comparing bytes.
"""

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

ID_BYTES = 4
"""Bytes of one packed id, little-endian and unsigned."""


def common_bytes(left: bytes, right: bytes, unit_bytes: int = ID_BYTES) -> int:
    """Length in bytes of the longest common prefix of whole units; both are whole units long."""
    size = min(len(left), len(right))
    if left[:size] == right[:size]:
        return size
    num_ids = size // ID_BYTES
    differs = np.frombuffer(left, np.uint32, num_ids) != np.frombuffer(right, np.uint32, num_ids)
    return int(differs.argmax()) * ID_BYTES // unit_bytes * unit_bytes


class LeftBy(NamedTuple):
    """Which request left a state: a note of the cache that drives the tree."""

    num_prompt_tokens: int
    went_on: bool
    """Whether it went on from the end of an earlier answer."""
    closing: int = -1
    """What closed the answer, where that is known (`policy/forecast/turns.py`); -1 if not."""


class Node:
    """A span of a path. `depth` and every count of tokens are in tokens, `key` is packed ids."""

    __slots__ = (
        "children",
        "depth",
        "first_waiting",
        "has_state",
        "is_live",
        "key",
        "last_hit_s",
        "last_pass_s",
        "left_by",
        "live_children",
        "num_hits",
        "num_locks",
        "on_probation",
        "parent",
        "serial",
    )

    def __init__(self, key: bytes, parent: "Node | None", depth: int, serial: int) -> None:
        self.key = key
        """Packed ids of the span."""
        self.parent = parent
        self.depth = depth
        """Tokens from the root to the end of the span."""
        self.serial = serial
        """Order of creation; breaks ties between equal nodes."""
        self.children: dict[bytes, Node] = {}
        """Live nodes and ghosts, by the first unit of their span."""
        self.live_children: dict[Node, None] = {}
        """Those of `children` that are live: of a prefix that many came through most are ghosts."""
        self.is_live = True
        self.has_state = False
        """Whether a recurrent state for exactly `depth` tokens is held."""
        self.on_probation = False
        """Whether the state is there on trial: the first to go, it counts for nothing in the worth of others."""
        self.num_locks = 0
        """Requests that use this node's state; a locked node is never evicted."""
        self.num_hits = 0
        """Requests that started from this node's state."""
        self.last_hit_s = 0.0
        """When the state was made or a request started from it."""
        self.last_pass_s = 0.0
        """When a request last ran through or ended here, as far as no live child knows of a later one."""
        self.first_waiting: int | None = None
        """Place of the first request of the queue that would start from this state (`policy/waiting.py`), if any."""
        self.left_by: LeftBy | None = None
        """The last request that left a state here near the end of its prompt or beyond it."""

    @property
    def num_live_children(self) -> int:
        """Live children."""
        return len(self.live_children)

    @property
    def num_children(self) -> int:
        """Live children."""
        return len(self.live_children)

    @property
    def num_proven_children(self) -> int:
        """Live children but those that end in a state on probation: 0, 1, or 2 for several, of the first few."""
        proven = (child for child in islice(self.live_children, 8) if child.live_children or not child.on_probation)
        return sum(1 for _ in islice(proven, 2))

    @property
    def is_locked(self) -> bool:
        """True if a request uses the state."""
        return self.num_locks > 0

    @property
    def checkpoint_depth_above(self) -> int:
        """Depth in tokens of the nearest shallower state on the path that is not on probation; 0 at the root."""
        node = self.parent
        while node is not None and (not node.has_state or node.on_probation):
            node = node.parent
        return 0 if node is None else node.depth

    @property
    def state_above(self) -> "Node | None":
        """The nearest shallower state on the path, on probation or not; None if there is none."""
        node = self.parent
        while node is not None and not node.has_state:
            node = node.parent
        return node

    @property
    def freed_tokens(self) -> int:
        """Tokens whose KV the node's eviction frees: its span and what becomes dead above, or none below a child.

        States on probation above go with it.
        """
        if self.live_children:
            return 0
        node = self.parent
        while node is not None and node.parent is not None and len(node.live_children) == 1:
            if node.has_state and not node.on_probation:
                break
            node = node.parent
        return self.depth - (0 if node is None else node.depth)

    def walk(self) -> "Iterator[Node]":
        """The node and everything below it, ghosts included."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def __repr__(self) -> str:
        kind = "live" if self.is_live else "ghost"
        return f"<Node {self.serial} depth={self.depth} {kind} state={self.has_state} children={len(self.children)}>"
