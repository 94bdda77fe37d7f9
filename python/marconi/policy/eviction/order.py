"""The order in which states are evicted: on trial, chosen ahead, by the rule's own order, at last those awaited.

    on trial, oldest first  ->  leaving, as chosen  ->  the rule's own order
                            ->  beyond the rule's scope, oldest hit first
                            ->  set aside, oldest hit first
                            ->  awaited, last in the queue first

A state beyond the rule's scope (an interior node on the way to several others) is a victim only where the rule has none
left: a server counts every state that is not in use as one that it can have, so there has to be a way to it. A state
that a waiting request would start from needs no forecast: of these the one that is used last is evicted first (Belady's
rule). A retained state is set aside for a while once others of its name space were evicted in its place
(`retention.py`). Which states are awaited, set aside, chosen ahead or on trial are facts of the nodes
(`hybrid_cache.py`).

Rules and tiers are built from two parts:

- `VictimQueue`, a priority queue whose entries can be changed: a sorted run and a binary heap, with lazy deletion. A
  new entry before or after all of the run joins it at that end, any other the heap. A time that only rises, or only
  falls, so costs a comparison to put and nothing to take out, whatever the number of entries. A change adds a new entry
  and forgets the old one, which is dropped when it comes first; all that is forgotten is dropped when it is more than
  half. All operations are amortised O(log n).
- `Octaves`, logarithms in whole steps that are the same on every processor: step(x) = floor(log2(x) * steps per
  octave). What ranks order by must not hang on the last bit of a logarithm, which libraries and processors round
  differently, so a number is looked up among the bounds of all steps and nothing is rounded.
"""

import heapq
import math
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Final, TypeAlias

import numpy as np

from marconi.policy.base import Eviction, Need, NodeView, PlannedState, Scope
from marconi.policy.forecast.hazard import Floats
from marconi.policy.request import Lease

Key: TypeAlias = float | tuple[float, ...]
Entry: TypeAlias = tuple[Key, int, NodeView]


class Octaves:
    """Steps of 1 / `steps_per_octave` of log2, rounded down.

    The bounds within an octave are the powers of two to 28 digits, as floats; a power of two itself is exact.
    """

    __slots__ = ("bounds", "first")

    def __init__(self, steps_per_octave: int, least: float) -> None:
        """Numbers below `least`, which is above 0, count as that."""
        _, exponent = math.frexp(least)
        within = [float(Decimal(2) ** (Decimal(step) / steps_per_octave - 1)) for step in range(steps_per_octave)]
        bounds = [
            math.ldexp(bound, octave) for octave in range(exponent, sys.float_info.max_exp + 1) for bound in within
        ]
        num_below = bisect_right(bounds, least)
        self.bounds = bounds[num_below:]
        """The least number of each step beyond the first, rising."""
        self.first = (exponent - 1) * steps_per_octave + num_below - 1
        """The step of `least`."""

    def step(self, number: float) -> int:
        """The step of a finite number."""
        return self.first + bisect_right(self.bounds, number)


class VictimQueue:
    """Nodes in rising order of (key, serial)."""

    __slots__ = ("_heap", "_run", "entries")

    def __init__(self) -> None:
        self.entries: dict[NodeView, Entry] = {}
        """The entry of each node, in no order; empty if there is none."""
        self._run: deque[Entry] = deque()
        """In rising order."""
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[NodeView]:
        return iter(self.entries)

    def __contains__(self, node: NodeView) -> bool:
        return node in self.entries

    def put(self, node: NodeView, key: Key) -> None:
        """Add `node`, or move it to `key`."""
        entries, run = self.entries, self._run
        old = entries.get(node)
        if old is not None and old[0] == key:
            return
        entry = entries[node] = (key, node.serial, node)
        if not run or not entry < run[-1]:
            run.append(entry)
        elif entry < run[0]:
            run.appendleft(entry)
        else:
            heapq.heappush(self._heap, entry)
        if len(run) + len(self._heap) > 64 + 2 * len(entries):
            self._drop_forgotten()

    def discard(self, node: NodeView) -> None:
        """Remove `node` if it is there."""
        self.entries.pop(node, None)

    def first(self) -> NodeView | None:
        """The node with the lowest key."""
        entry = self.first_entry()
        return None if entry is None else entry[2]

    def keys(self, nodes: Sequence[NodeView]) -> Floats:
        """The keys of `nodes`, a row each; nan for those that are not there."""
        get = self.entries.get
        found = [get(node) for node in nodes]
        absent = next((_absent(entry[0]) for entry in found if entry is not None), math.nan)
        keys = np.array([absent if entry is None else entry[0] for entry in found], np.float64)
        return keys if keys.ndim > 1 else keys[:, None]

    def first_entry(self) -> Entry | None:
        """The lowest key, the serial and the node of it."""
        entries, run, heap = self.entries, self._run, self._heap
        while run and entries.get(run[0][2]) is not run[0]:
            run.popleft()
        while heap and entries.get(heap[0][2]) is not heap[0]:
            heapq.heappop(heap)
        if not heap:
            return run[0] if run else None
        return heap[0] if not run or heap[0] < run[0] else run[0]

    def _drop_forgotten(self) -> None:
        entries = self.entries
        self._run = deque(entry for entry in self._run if entries.get(entry[2]) is entry)
        self._heap = [entry for entry in self._heap if entries.get(entry[2]) is entry]
        heapq.heapify(self._heap)


_RULE: Final = 1
"""The place among the tiers of what the rule ranks."""


def _absent(key: Key) -> Key:
    return (math.nan,) * len(key) if isinstance(key, tuple) else math.nan


class _Tier:
    """Nodes outside the rule's order."""

    __slots__ = ("all", "leaves", "number", "place")

    def __init__(self, number: int, place: Callable[[NodeView], float]) -> None:
        """`number` rises in the order of tiers, and `place` is a node's within this one."""
        self.number = number
        self.place = place
        self.all = VictimQueue()
        self.leaves = VictimQueue()
        """Those whose eviction frees KV."""

    def put(self, node: NodeView) -> None:
        """Add `node`, or move it."""
        key = self.place(node)
        self.all.put(node, key)
        if node.num_children:
            self.leaves.discard(node)
        else:
            self.leaves.put(node, key)

    def discard(self, node: NodeView) -> None:
        """Remove `node`."""
        self.all.discard(node)
        self.leaves.discard(node)

    def first(self, need: Need) -> NodeView | None:
        """The first that helps `need`."""
        queue = self.leaves if need is Need.KV else self.all
        return queue.first() if queue.entries else None


class _Leaving(_Tier):
    """Nodes whose KV is counted, as it is when the tree reports a change."""

    __slots__ = ("_freed_tokens", "num_tokens")

    def __init__(self) -> None:
        super().__init__(0, lambda node: node.leaving or 0)
        self.num_tokens = 0
        self._freed_tokens: dict[NodeView, int] = {}

    def put(self, node: NodeView) -> None:
        super().put(node)
        num_tokens = node.freed_tokens
        self.num_tokens += num_tokens - self._freed_tokens.get(node, 0)
        self._freed_tokens[node] = num_tokens

    def discard(self, node: NodeView) -> None:
        super().discard(node)
        self.num_tokens -= self._freed_tokens.pop(node, 0)


class Order(Eviction):
    """`rule`, with two tiers before it and three after it."""

    scope = Scope.ANY

    def __init__(self, rule: Eviction) -> None:
        """`rule` knows no node yet."""
        self.rule = rule
        self._max_children = rule.scope.value
        self._follows_ghosts = rule.follows_ghosts
        self._has_scope = rule.scope is not Scope.ANY
        self._on_trial = _Tier(_RULE - 2, lambda node: node.last_hit_s)
        self._leaving = _Leaving()
        self._beyond_scope = _Tier(_RULE + 1, lambda node: node.last_hit_s)
        self._aside = _Tier(_RULE + 2, lambda node: node.last_hit_s)
        self._awaited = _Tier(_RULE + 3, lambda node: -(node.first_waiting or 0))
        self._tiers: dict[NodeView, _Tier | None] = {}
        """Tier of each node; None for those that the rule ranks."""

    def update(self, node: NodeView) -> None:
        """Put `node` into its tier."""
        tier: _Tier | None = None
        if node.first_waiting is not None:
            tier = self._awaited
        elif node.leaving is not None:
            tier = self._leaving
        elif node.set_aside:
            tier = self._aside
        elif node.on_trial:
            tier = self._on_trial
        elif self._has_scope and node.num_children > self._max_children:
            tier = self._beyond_scope
        tiers = self._tiers
        old = tiers.get(node)
        if old is not tier:
            if old is not None:
                old.discard(node)
            elif node in tiers:
                self.rule.discard(node)
        tiers[node] = tier
        if tier is None:
            self.rule.update(node)
        else:
            tier.put(node)

    def discard(self, node: NodeView) -> None:
        """Forget `node`'s place, if it has one."""
        tiers = self._tiers
        if node in tiers:
            tier = tiers.pop(node)
            if tier is not None:
                tier.discard(node)
            self.rule.discard(node)
        elif self._follows_ghosts and not node.num_locks:
            self.rule.discard(node)

    def __iter__(self) -> Iterator[NodeView]:
        """Every node that has a place, in no order."""
        return iter(self._tiers)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The first of the first tier that has any."""
        found = self._on_trial.first(need) or self._leaving.first(need) or self.rule.victim(need, now_s)
        return found or self._beyond_scope.first(need) or self._aside.first(need) or self._awaited.first(need)

    def next_to_leave(self, need: Need, now_s: float) -> NodeView | None:
        """The victim behind those that are leaving already, unless it is set aside or a request awaits it."""
        found = self._on_trial.first(need) or self.rule.victim(need, now_s)
        return found or self._beyond_scope.first(need)

    def worths(self, nodes: Sequence[NodeView], now_s: float) -> Floats:
        """The tier, and within it the rule's rows or the place; nan for nodes that have no place."""
        of_rule = self.rule.worths(nodes, now_s)
        is_ranked = ~np.isnan(of_rule[:, 0])
        rows = np.column_stack((np.where(is_ranked, _RULE, np.nan), of_rule))
        for at in np.flatnonzero(~is_ranked).tolist():
            tier = self._tiers.get(nodes[at])
            if tier is not None:
                rows[at] = tier.number, tier.place(nodes[at]), *[0.0] * (of_rule.shape[1] - 1)
        return rows

    @property
    def num_on_trial(self) -> int:
        """States on trial."""
        return len(self._on_trial.all)

    @property
    def num_leaving(self) -> int:
        """States that are leaving."""
        return len(self._leaving.all)

    @property
    def num_leaving_tokens(self) -> int:
        """Tokens of KV that leaving states free one by one; KV that only several together free is not counted."""
        return self._leaving.num_tokens

    @property
    def num_awaited(self) -> int:
        """States that waiting requests would start from, and that are evicted after all others."""
        return len(self._awaited.all.entries)

    def kept_instead(self, victim: NodeView, need: Need) -> tuple[NodeView, float] | None:
        """The rule's answer for a state that it ranks, else None."""
        return None if self._tiers.get(victim, self._leaving) else self.rule.kept_instead(victim, need)

    def outranks(self, planned: PlannedState, victim: NodeView, need: Need, now_s: float) -> bool:
        """The rule's answer for a victim that it ranks; True for any other."""
        return self._tiers.get(victim) is not None or self.rule.outranks(planned, victim, need, now_s)

    def arrived(self, lease: Lease, now_s: float) -> None:
        """Tell the rule."""
        self.rule.arrived(lease, now_s)

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """Tell the rule."""
        self.rule.admitted(nodes, lease, now_s)

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Tell the rule."""
        self.rule.evicting(node, now_s)
