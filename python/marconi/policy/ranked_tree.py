"""A tree and the eviction rule that ranks its nodes, kept in step.

Every change of the tree is told to the rule at once (`tell`), so that a victim is always one that may go. When memory
is short, and of what, is for whoever owns the memory: a replay keeps a budget (`cache.py`), a server takes memory while
its requests run (`served.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from marconi.policy.eviction.base import Eviction, Need, NodeView
from marconi.policy.lease import Lease
from marconi.policy.request import Request
from marconi.tree import Freed, Match, Node, RadixTree


@dataclass(slots=True)
class Counters:
    """What happened, in counts of requests, states and tokens."""

    num_requests: int = 0
    num_too_large: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_states_written: int = 0
    num_states_hit: int = 0
    num_evictions: dict[Need, int] = field(default_factory=lambda: dict.fromkeys(Need, 0))
    num_evictions_on_probation: int = 0
    """Of the victims those whose state was there on trial."""
    num_evicted_tokens: int = 0


class Beyond(NamedTuple):
    """Of a request's path what comes after a node with a state that the request keeps in use."""

    node: Node
    path: bytes
    """In whole units, from the node on."""


class RankedTree:
    """What is held, in an order to give it up; all times are passed in, in seconds."""

    def __init__(self, tree: RadixTree, eviction: Eviction) -> None:
        """What `tree` holds; `eviction` knows no node yet and is told of those that the tree has noted."""
        self.tree = tree
        self.eviction = eviction
        self.counters = Counters()
        self._max_children = eviction.scope.value
        self._ranked: set[Node] = set()
        """Those that the rule was told to rank: of others it has to hear nothing while they are in use."""
        self.tell()

    def match(self, request: Request) -> Match:
        """What is known of `request`, and where it would start from: the last prompt token is always computed."""
        return self.tree.match(self._path(request), request.num_prompt_tokens - 1, request.namespace)

    def begin(self, request: Request, now_s: float) -> Lease:
        """Match `request`, and touch and lock the state that it starts from."""
        lease = self.arrive(Lease(request, self.match(request)), now_s)
        if lease.source is not None:
            self.tree.lock(lease.source)
            self.tell()
        return lease

    def arrive(self, lease: Lease, now_s: float) -> Lease:
        """Count a request that has been looked up, and touch the state that it starts from; the rule is not told."""
        request, match = lease
        self.eviction.arrived(lease, now_s)
        counters, node = self.counters, match.checkpoint
        counters.num_requests += 1
        counters.num_prompt_tokens += request.num_prompt_tokens
        if node.parent is not None:
            counters.num_hit_tokens += node.depth
            counters.num_states_hit += 1
            node.num_hits += 1
            node.last_hit_s = node.last_pass_s = now_s
            self.tree.changed.append(node)
        return lease

    def insert(self, lease: Lease, depths: Sequence[int], now_s: float, beyond: Beyond | None = None) -> list[Node]:
        """Hold the request's path up to the last of `depths`, in tokens, and a state at each; the rule is not told.

        `beyond` says where the request is already held to, so that only what comes after is looked at.
        """
        tree, request = self.tree, lease.request
        num_states = tree.num_states
        if beyond is None:
            made = tree.insert(self._path(request), depths, request.namespace)
        else:
            made = tree.insert(beyond.path, depths, request.namespace, beyond.node)
        self.counters.num_states_written += tree.num_states - num_states
        for node in made:
            node.last_hit_s = node.last_pass_s = now_s
            tree.changed.append(node)
        self.eviction.admitted(made, lease, now_s)
        return made

    def evict(self, need: Need, now_s: float) -> Freed | None:
        """Give up what is worth least for `need`; None if nothing may go."""
        victim = self.eviction.victim(need, now_s)
        return None if victim is None else self.give_up(victim, need, now_s)

    def give_up(self, victim: NodeView, need: Need, now_s: float) -> Freed:
        """Evict `victim`, a node of this tree that the rule ranks, for `need`."""
        assert isinstance(victim, Node)
        self.eviction.evicting(victim, now_s)
        self.counters.num_evictions_on_probation += victim.on_probation
        freed = self.tree.evict(victim)
        self.counters.num_evictions[need] += 1
        self.counters.num_evicted_tokens += freed.num_tokens
        self.tell()
        return freed

    def tell(self) -> None:
        """Pass the tree's changes on to the eviction rule."""
        eviction, max_children, ranked = self.eviction, self._max_children, self._ranked
        changed = self.tree.changed
        for node in dict.fromkeys(changed):
            if node.has_state and not node.num_locks and len(node.live_children) <= max_children:
                ranked.add(node)
                eviction.update(node)
            elif node in ranked:
                ranked.remove(node)
                eviction.discard(node)
            elif not node.num_locks:
                eviction.discard(node)
        changed.clear()

    def _path(self, request: Request) -> bytes:
        tree = self.tree
        return request.path[: request.num_known_tokens // tree.unit_tokens * tree.unit_bytes]
