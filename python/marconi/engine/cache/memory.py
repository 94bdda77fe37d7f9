"""Where the KV and the states of the tree's nodes lie on the device, and what of it is in use.

Of every live node the indices of its span's KV (`Segments`), of every node with a state its slot. Freed indices and
slots are collected until SGLang's allocators take them back.

A lock on a node protects the KV of its whole path: each node counts the locks at or below it, and

    protected tokens = tokens in spans with a count > 0,      evictable = held - protected.

Where there is a log, every change is appended to it, for the worker's events (`marconi.events`).

Owner: the tree core, on the scheduler's thread.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.unified_cache.cache_action import CacheAction, ComponentAction, FreeDeviceKV

from marconi.events.tree_log import Tenant, TreeLog
from marconi.tree import Node


def path_up(node: Node) -> Iterator[Node]:
    """The node and those above it, the root aside."""
    while node.parent is not None:
        yield node
        node = node.parent


def num_tokens(node: Node) -> int:
    """Tokens of a node's span."""
    assert node.parent is not None
    return node.depth - node.parent.depth


class Segments:
    """Indices, int64, in order along each path, by the node whose span they hold the KV of.

    They are kept as they were handed over: joining two spans joins two lists, splitting one cuts a segment into two
    views. A node may have fewer than its span has tokens, as long as its path is filled from the front.
    """

    __slots__ = ("_by_node", "_empty")

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._by_node: dict[Node, list[torch.Tensor]] = {}
        self._empty = torch.empty(0, dtype=torch.int64, device=device)

    def __contains__(self, node: Node) -> bool:
        return node in self._by_node

    def open(self, node: Node) -> None:
        """`node` has an entry from now on, and no indices yet."""
        self._by_node[node] = []

    def add(self, node: Node, indices: torch.Tensor) -> None:
        """The next tokens of the span of `node` lie at `indices`."""
        self._by_node.setdefault(node, []).append(indices)

    def pop(self, node: Node) -> list[torch.Tensor]:
        """Forget a node; returns what it had."""
        return self._by_node.pop(node, [])

    def num_tokens(self, node: Node) -> int:
        """Tokens of the span of `node` that have their indices."""
        return sum(map(len, self._by_node.get(node, ())))

    def split(self, upper: Node, lower: Node) -> None:
        """Cut what is `lower`'s where `upper` ends."""
        num_left = num_tokens(upper)
        above: list[torch.Tensor] = []
        below: list[torch.Tensor] = []
        for segment in self._by_node[lower]:
            cut = min(len(segment), num_left)
            num_left -= cut
            if cut:
                above.append(segment[:cut])
            if cut < len(segment):
                below.append(segment[cut:])
        self._by_node[upper], self._by_node[lower] = above, below

    def join(self, upper: Node, lower: Node) -> None:
        """Put what was `upper`'s in front of `lower`'s."""
        self._by_node[lower] = self._by_node.pop(upper) + self._by_node[lower]

    def along(self, node: Node, start: Node | None = None) -> torch.Tensor:
        """The indices of all tokens before the end of `node`, in order; of those after `start`, which is above it."""
        segments: list[torch.Tensor] = []
        while node is not start and node.parent is not None:
            segments.extend(reversed(self._by_node[node]))
            node = node.parent
        segments.reverse()
        return torch.cat(segments) if segments else self._empty

    def all(self) -> torch.Tensor:
        """All indices, in no order."""
        segments = [segment for held in self._by_node.values() for segment in held]
        return torch.cat(segments) if segments else self._empty

    def nodes(self) -> set[Node]:
        """Those that have an entry."""
        return set(self._by_node)


class DeviceMemory:
    """A `marconi.tree.memory.Memory` on SGLang's pools. Indices are int64, a slot is a tensor of one index."""

    num_window_tokens = num_protected_window_tokens = 0
    """Tokens of KV in sliding windows that are held, and those of them that are in use."""

    def __init__(self, device: torch.device | str, log: TreeLog | None = None) -> None:
        self._log = log
        self.states: dict[Node, torch.Tensor] = {}
        self.ends: set[Node] = set()
        """Nodes with a state at which a request ended."""
        self.num_protected_tokens = 0
        self.num_protected_states = 0
        self._segments = Segments(device)
        self._num_locks: dict[Node, int] = {}
        """Locks at a node or below it; of nodes with any."""
        self._incoming: tuple[torch.Tensor, int] | None = None
        self._freed_kv: list[torch.Tensor] = []
        self._freed_states: list[torch.Tensor] = []
        self._no_slots = torch.empty(0, dtype=torch.int64, device=device)

    # Memory that is held and freed

    def offer(self, indices: torch.Tensor, from_depth: int, tenant: Tenant) -> None:
        """The KV of the path that is inserted next, from `from_depth` tokens on; `tenant` is its namespace's."""
        self._incoming = (indices, from_depth)
        if self._log is not None:
            self._log.tenant = tenant

    def keep_state(self, node: Node, slot: torch.Tensor) -> None:
        """The state of `node`, which has none yet, lies in `slot`."""
        self.states[node] = slot
        if self._log is not None:
            self._log.kept_state(node)

    def settle(self, node: Node, params: InsertParams, num_held: int) -> "list[CacheAction | ComponentAction]":
        """The frees after SGLang's insert of `params`, which ended at `node`; `num_held` tokens were held before."""
        assert params.value is not None
        duplicates = params.value[params.prev_prefix_len : num_held]
        return [FreeDeviceKV([duplicates])] if len(duplicates) else []

    def withdraw(self) -> None:
        """The insert is over."""
        self._incoming = None

    def take_freed_kv(self) -> list[torch.Tensor]:
        """Indices that are no longer held, for the allocator, in one piece: it looks at its whole list for each."""
        freed, self._freed_kv = self._freed_kv, []
        return [torch.cat(freed)] if len(freed) > 1 else freed

    def take_freed_states(self) -> list[torch.Tensor]:
        """Slots that are no longer held, for the allocator."""
        freed, self._freed_states = self._freed_states, []
        return freed

    def give_back(self, kv_allocator: Any, state_allocator: Any) -> None:
        """Give SGLang's allocators what is no longer held; each copies the list of all that is free at every call."""
        for kv in self.take_freed_kv():
            kv_allocator.free_segment(kv, start_pos=0)
        states = self.take_freed_states()
        if states:
            state_allocator.free(states[0] if len(states) == 1 else torch.cat(states))

    def num_resident(self, node: Node) -> int:
        """Tokens before the end of the span of `node` that layers with sliding windows have KV of."""
        return num_tokens(node)

    def path_indices(self, node: Node, start: Node | None = None) -> torch.Tensor:
        """The KV of all tokens before the end of `node`, in order; of those after `start`, which is above it."""
        return self._segments.along(node, start)

    def all_indices(self) -> torch.Tensor:
        """All KV that is held, in no order."""
        return self._segments.all()

    def all_states(self) -> torch.Tensor:
        """All slots that are held, in no order."""
        return torch.cat(list(self.states.values())) if self.states else self._no_slots

    # Locks

    def is_protected(self, node: Node) -> bool:
        """True if a lock holds the KV of `node`."""
        return node in self._num_locks

    def num_unprotected_tokens(self, node: Node) -> int:
        """Tokens of the path of `node` that a lock on it would protect anew."""
        return sum(num_tokens(above) for above in path_up(node) if above not in self._num_locks)

    def protect(self, node: Node) -> None:
        """A lock was taken on `node`."""
        if node.num_locks == 1:
            self.num_protected_states += 1
        self._count(node, None)

    def unprotect(self, node: Node) -> None:
        """A lock was given back on `node`."""
        if not node.num_locks:
            self.num_protected_states -= 1
        locks = self._num_locks
        while (parent := node.parent) is not None:
            num_locks = locks[node] - 1
            if num_locks:
                locks[node] = num_locks
            else:
                del locks[node]
                self.num_protected_tokens -= node.depth - parent.depth
            node = parent

    def move_protection(self, old: Node | None, new: Node) -> None:
        """A lock was taken on `new` and one given back on `old`, at or above it; None is the root.

        What both hold stays as it is, so it costs the nodes between.
        """
        if new is old:
            return
        if new.num_locks == 1:
            self.num_protected_states += 1
        if old is not None and not old.num_locks:
            self.num_protected_states -= 1
        self._count(new, old)

    def _count(self, node: Node, old: Node | None) -> None:
        """Count one more lock on `node` and those above it, as far as `old`."""
        locks = self._num_locks
        while (parent := node.parent) is not None:
            if node is old:
                return
            num_locks = locks.get(node, 0)
            locks[node] = num_locks + 1
            if not num_locks:
                self.num_protected_tokens += node.depth - parent.depth
            node = parent
        assert old is None, f"{old} is not above it"

    # Changes of the tree

    def held(self, node: Node) -> None:
        """Take the span's KV from what was offered."""
        assert self._incoming is not None, f"{node}: no KV was offered for its span"
        assert node.parent is not None
        indices, from_depth = self._incoming
        start = node.parent.depth - from_depth
        assert start >= 0, f"{node}: begins before the KV that was offered"
        end = node.depth - from_depth
        assert end <= indices.shape[0], f"{node}: ends behind the KV that was offered"
        segment = indices if not start and end == indices.shape[0] else indices[start:end]
        self._segments.add(node, segment)
        if self._log is not None:
            self._log.held(node)

    def dropped(self, node: Node) -> None:
        """The span's KV can be freed."""
        assert node not in self._num_locks, f"{node} is in use"
        self._freed_kv.extend(self._segments.pop(node))
        if self._log is not None:
            self._log.dropped(node)

    def dropped_state(self, node: Node) -> None:
        """The state's slot can be freed."""
        self._freed_states.append(self.states.pop(node))
        self.ends.discard(node)
        if self._log is not None:
            self._log.dropped_state(node)

    def split(self, upper: Node, lower: Node) -> None:
        """Cut the segments where `upper` ends."""
        self._segments.split(upper, lower)
        if lower in self._num_locks:
            self._num_locks[upper] = self._num_locks[lower]
        if self._log is not None:
            self._log.split(upper, lower)

    def joined(self, upper: Node, lower: Node) -> None:
        """Put the segments together; a lock at or below the one is at or below the other."""
        self._segments.join(upper, lower)
        assert self._num_locks.pop(upper, 0) == self._num_locks.get(lower, 0), f"{lower}: a lock lies between"
        if self._log is not None:
            self._log.joined(upper, lower)

    def check_invariants(self, nodes: list[Node]) -> None:
        """Raise `AssertionError` unless it agrees with the live `nodes` of the tree."""
        assert set(nodes) == self._segments.nodes(), "KV of other spans than the tree's"
        assert {node for node in nodes if node.has_state} == set(self.states), "slots of other states than the tree's"
        assert self.ends <= set(self.states), "the end of a request without its state"
        locks: dict[Node, int] = {}
        for node in nodes:
            assert self._segments.num_tokens(node) == num_tokens(node), f"{node}: KV of another length"
            for above in path_up(node) if node.num_locks else ():
                locks[above] = locks.get(above, 0) + node.num_locks
        assert locks == self._num_locks, "locks are miscounted"
        assert self.num_protected_tokens == sum(map(num_tokens, locks)), "protected tokens are miscounted"
        assert self.num_protected_states == sum(node.num_locks > 0 for node in nodes), "protected states are miscounted"
        assert len(torch.unique(self.all_indices())) == len(self.all_indices()), "KV is held twice"
        assert len(torch.unique(self.all_states())) == len(self.states), "a slot is held twice"
