"""A node: the span of tokens between its parent's depth and its own, and perhaps the state at its end.

A node is *live* when the KV of its span is held, else it is a *ghost*: an outline that remembers that a prefix was
seen. Only the tree changes a node's structure; the two times belong to the cache that drives the tree.

A host tier may hold a copy of a node's KV and of its state, whether the device holds them or not (`host.py`).

A span is packed ids: comparing prefixes is comparing bytes.
"""

from bisect import bisect_left
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np

ID_BYTES = 4
"""Bytes of one packed id, little-endian and unsigned."""


_NEAR_BYTES = 16 * ID_BYTES


def common_bytes(
    left: bytes, right: bytes, unit_bytes: int = ID_BYTES, left_start: int = 0, right_start: int = 0
) -> int:
    """Length in bytes of the longest common prefix of whole units, of what comes after the starts; nothing is copied.

    Both are whole units long, and so is what comes before the starts, in bytes.
    """
    size, num_right = len(left) - left_start, len(right) - right_start
    if size > num_right:
        size = num_right
    if not right.startswith(memoryview(left)[left_start : left_start + size], right_start):
        # Most paths that differ do so within a few ids, of which a number is made sooner than an array.
        near = min(size, _NEAR_BYTES)
        near_left = int.from_bytes(left[left_start : left_start + near], "little")
        differing = near_left ^ int.from_bytes(right[right_start : right_start + near], "little")
        if differing:
            size = ((differing & -differing).bit_length() - 1) // 8
        else:
            num_ids = size // ID_BYTES
            left_ids = np.frombuffer(left, np.uint32, num_ids, left_start)
            differs = left_ids != np.frombuffer(right, np.uint32, num_ids, right_start)
            size = int(differs.argmax()) * ID_BYTES
    return size // unit_bytes * unit_bytes


class LeftBy(NamedTuple):
    """Which request left a state: a note of the cache that drives the tree."""

    num_prompt_tokens: int
    continued: bool
    """True if the request resumed from the end of an earlier answer."""
    closing: int = -1
    """How the answer closed (`policy/forecast/turns.py`); -1 if unknown."""
    namespace: int = 0
    is_open: bool = True
    """False once a later request has continued its prompt or its answer."""


class Kept(NamedTuple):
    """The state that an eviction order kept when it evicted another: the next of least worth among those it weighed."""

    depth: int
    """In tokens."""
    place: StrEnum
    """A member of `policy.residency.Place`; the tree only keeps it."""
    num_times: float
    """Its worth over that of the evicted state."""


class Absence(NamedTuple):
    """Why no state stands at a depth at which one stood or was planned."""

    depth: int
    """In tokens."""
    cause: StrEnum
    """A member of `policy.causes.Cause`; the tree only keeps it."""
    at_s: float
    """When it was evicted, or should have been written, in seconds."""
    kept: Kept | None = None
    """The state kept instead of the evicted one; None if the rule named none."""


NONE_BELOW: Final[Any] = MappingProxyType[Any, Any]({})
"""In place of a dictionary for each node without children: most ghosts have none. It refuses to be written to."""


class Node:
    """A span of a path. `depth` and every count of tokens are in tokens, `key` is packed ids."""

    __slots__ = (
        "absences",
        "checkpoint_depth_above",
        "children",
        "depth",
        "first_waiting",
        "freed_tokens",
        "has_copy",
        "has_state",
        "held_since_s",
        "host_copy",
        "hosted_children",
        "is_hosted",
        "is_live",
        "key",
        "last_hit_s",
        "last_pass_s",
        "leaving",
        "left_by",
        "live_children",
        "num_children",
        "num_hits",
        "num_locks",
        "on_trial",
        "parent",
        "serial",
        "set_aside",
    )

    def __init__(self, key: bytes, parent: "Node | None", depth: int, serial: int) -> None:
        self.key = key
        """Packed ids of the span."""
        self.parent = parent
        self.depth = depth
        """Tokens from the root to the end of the span."""
        self.serial = serial
        """Order of creation; breaks ties between equal nodes."""
        self.children: dict[bytes, Node] = NONE_BELOW
        """Live nodes and ghosts, by the first unit of their span."""
        self.live_children: dict[Node, None] = NONE_BELOW
        """Those of `children` that are live: of a prefix that many came through most are ghosts."""
        self.num_children = 0
        """Live children."""
        self.is_live = True
        self.has_state = False
        """Whether a recurrent state for exactly `depth` tokens is held."""
        self.checkpoint_depth_above = 0
        """With a state, the depth in tokens of the nearest shallower one on the path; 0 if there is none."""
        self.freed_tokens = 0
        """With a state, tokens of KV that its eviction frees: its span and what becomes dead above; 0 with children."""
        self.is_hosted = False
        """Whether the host holds a copy of the KV of its span."""
        self.has_copy = False
        """Whether the host holds its state, too."""
        self.host_copy: HostCopy | None = None
        """The copy of its state on the host, held or not; None as long as there was none."""
        self.hosted_children: dict[Node, None] | None = None
        """Those of `children` whose KV the host holds; None as long as there was none."""
        self.absences: list[Absence] | None = None
        """Depths within its span where a state is missed, rising; None as long as there was none."""
        self.num_locks = 0
        """Requests that use this node's state; a locked node is never evicted."""
        self.num_hits = 0
        """Requests that started from this node's state."""
        self.held_since_s: float | None = None
        """When the device got its state; None before the cache has said so."""
        self.last_hit_s = 0.0
        """When the state was made or a request started from it."""
        self.last_pass_s = 0.0
        """When a request last ran through or ended here, as far as no live child knows of a later one."""
        self.first_waiting: int | None = None
        """Place of the first request of the queue that would start from this state (`policy/waiting.py`), if any."""
        self.leaving: int | None = None
        """Place among the states that are evicted next, chosen ahead (`policy/write_behind.py`), if it is one."""
        self.on_trial = False
        """Whether its state is on trial: prompts have not parted there since (`policy/admission/trials.py`)."""
        self.set_aside = False
        """Whether it is retained, and others of its name space were evicted in its place (`policy/retention.py`)."""
        self.left_by: LeftBy | None = None
        """The last request that left a state here near the end of its prompt or beyond it."""

    @property
    def num_proven_children(self) -> int:
        """Children but ends that were passed over, as far as a tier holds them: 0, 1, or 2 for several."""
        num_proven = 0
        # A call for each child would be a tenth of all calls of a request.
        for child in islice(self.live_children, 8):
            left_by = child.left_by
            if child.live_children or left_by is None or left_by.is_open or child.num_hits:
                num_proven += 1
                if num_proven == 2:
                    break
        return max(num_proven, min(len(self.hosted_children), 2)) if self.hosted_children else num_proven

    @property
    def is_passed_over(self) -> bool:
        """True if no request has resumed from the state, and its prompt was continued from another one."""
        return self.left_by is not None and not self.left_by.is_open and not self.num_hits

    @property
    def state_above(self) -> "Node | None":
        """The nearest shallower state on the path; None if there is none."""
        node = self.parent
        while node is not None and not node.has_state:
            node = node.parent
        return node

    @property
    def lasting_depth_above(self) -> int:
        """Depth of the nearest shallower state on the path that is not on trial; 0 if there is none."""
        above = self.state_above
        while above is not None and above.on_trial:
            above = above.state_above
        return 0 if above is None else above.depth

    @property
    def state_below(self) -> "Node | None":
        """The nearest deeper state, where there is only one path below; None if there is none."""
        node = self
        while len(node.live_children) == 1:
            (node,) = node.live_children
            if node.has_state:
                return node
        return None

    def count_freed_tokens(self) -> int:
        """`freed_tokens`, counted anew."""
        if self.live_children:
            return 0
        node = self.parent
        while node is not None and node.parent is not None and node.num_children == 1 and not node.has_state:
            node = node.parent
        return self.depth - (0 if node is None else node.depth)

    def absent(self, absence: Absence) -> None:
        """Remember why no state stands at a depth within the span, in place of what was remembered of that depth."""
        if self.absences is None:
            self.absences = [absence]
            return
        index = bisect_left(self.absences, absence.depth, key=attrgetter("depth"))
        known = index < len(self.absences) and self.absences[index].depth == absence.depth
        self.absences[index : index + known] = [absence]

    def present(self) -> None:
        """Forget why no state stood at its end: one does."""
        if self.absences and self.absences[-1].depth == self.depth:
            self.absences.pop()

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


class HostCopy:
    """A state on the host, as a rule that ranks it sees it. Depths and counts are in tokens, times in seconds."""

    __slots__ = ("leaving", "node", "num_locks", "stored_as")

    def __init__(self, node: Node) -> None:
        self.node = node
        """It has this one object for all its copies."""
        self.num_locks = 0
        """Loads and writes that read it."""
        self.leaving: int | None = None
        """Its place among those that are dropped before all others; None if it is not one of them."""
        self.stored_as: str | None = None
        """Hash of its path in a store behind the host, once it was written there; it may be dropped since."""

    @property
    def is_held(self) -> bool:
        """False before it is made and once it is dropped."""
        return self.node.has_copy

    @property
    def serial(self) -> int:
        """Serial number of the node, by which ties are broken."""
        return self.node.serial

    @property
    def depth(self) -> int:
        """Tokens that the state stands for."""
        return self.node.depth

    @property
    def state_above(self) -> "HostCopy | None":
        """The nearest shallower copy on the path; None if there is none."""
        node = self.node.parent
        while node is not None and not node.has_copy:
            node = node.parent
        return None if node is None else node.host_copy

    @property
    def checkpoint_depth_above(self) -> int:
        """Depth of the nearest shallower state on either tier, but for those on trial; 0 if there is none."""
        node = self.node.parent
        while node is not None and (node.on_trial or not (node.has_copy or node.has_state)):
            node = node.parent
        return 0 if node is None else node.depth

    lasting_depth_above = checkpoint_depth_above

    @property
    def freed_tokens(self) -> int:
        """Tokens whose KV on the host is freed with it: its span and what becomes dead above, or none below a child."""
        if self.node.hosted_children:
            return 0
        above = self.node.parent
        while above is not None and above.parent is not None and not above.has_copy:
            if above.hosted_children is not None and len(above.hosted_children) > 1:
                break
            above = above.parent
        return self.node.depth - (0 if above is None else above.depth)

    @property
    def last_hit_s(self) -> float:
        """When a request last resumed from the node's state, in seconds."""
        return self.node.last_hit_s

    @property
    def last_pass_s(self) -> float:
        """When a request last ran through the node, in seconds."""
        return self.node.last_pass_s

    @property
    def num_hits(self) -> int:
        """Requests that resumed from the node's state."""
        return self.node.num_hits

    @property
    def num_children(self) -> int:
        """Children on the host."""
        return len(self.node.hosted_children or ())

    @property
    def num_proven_children(self) -> int:
        """Proven children of the node, on either tier."""
        return self.node.num_proven_children

    @property
    def is_passed_over(self) -> bool:
        """Whether the node's prompt was continued from another state."""
        return self.node.is_passed_over

    @property
    def state_below(self) -> "HostCopy | None":
        """The nearest deeper copy, where there is only one path below; None if there is none."""
        node = self.node
        while node.hosted_children is not None and len(node.hosted_children) == 1:
            (node,) = node.hosted_children
            if node.has_copy:
                return node.host_copy
        return None

    @property
    def left_by(self) -> LeftBy | None:
        """The last request that wrote the node's state near its prompt's end or beyond; None if there is none."""
        return self.node.left_by

    @property
    def first_waiting(self) -> int | None:
        """Queue position of the first waiting request that would resume here; None if there is none."""
        return self.node.first_waiting

    @property
    def on_trial(self) -> bool:
        """True if the state of its node is on trial."""
        return self.node.on_trial

    @property
    def set_aside(self) -> bool:
        """False: only states on the device are retained."""
        return False

    @property
    def has_copy(self) -> bool:
        """Whether the device holds the state, too."""
        return self.node.has_state

    def __repr__(self) -> str:
        return f"<HostCopy of {self.node}>"
