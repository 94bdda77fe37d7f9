"""A prefix cache: a tree, an admission rule, an eviction rule and a budget, driven by requests.

A request begins by matching, which locks the state it starts from, and finishes by leaving its states, after which the
eviction rule names victims until the budget is kept. Where a rule `spares_newest`, the deepest state that a request
has just left is the victim of its own finish only if everything else is in use. Where not all of a request's states
fit beside its KV the shallow ones are not left; a request whose KV and one state exceed the budget is served and
counted, and leaves nothing.

The serving engine's tree takes the tree's place there; the rules are the same objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from marconi.policy.admission.base import Admission
from marconi.policy.eviction.base import Costs, Eviction, Need
from marconi.policy.lease import Lease
from marconi.policy.request import Request
from marconi.tree import Match, Node, RadixTree
from marconi.tree.span import ID_BYTES


@dataclass(frozen=True, slots=True)
class JointBudget:
    """One pool for KV and states."""

    num_bytes: int

    def __post_init__(self) -> None:
        """Raise `ValueError` unless there is memory."""
        if self.num_bytes < 1:
            raise ValueError(f"a memory of {self.num_bytes} bytes; more than 0 is right")


@dataclass(frozen=True, slots=True)
class SplitBudget:
    """A pool for KV and a pool for states."""

    kv_bytes: int
    state_bytes: int

    def __post_init__(self) -> None:
        """Raise `ValueError` unless both pools have memory."""
        if self.kv_bytes < 1 or self.state_bytes < 1:
            raise ValueError(f"pools of {self.kv_bytes} and {self.state_bytes} bytes; more than 0 each is right")


Budget: TypeAlias = JointBudget | SplitBudget


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
    num_evicted_tokens: int = 0


class PrefixCache:
    """Serves requests; all times are passed in, in seconds."""

    def __init__(self, tree: RadixTree, admission: Admission, eviction: Eviction, costs: Costs, budget: Budget) -> None:
        """A cache of what `tree` holds; `eviction` knows no node yet and is told of those that the tree has noted."""
        self.tree = tree
        self.admission = admission
        self.eviction = eviction
        self.costs = costs
        self.budget = budget
        self.counters = Counters()
        self._max_children = eviction.scope.value
        self._tell()

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.tree.num_tokens * self.costs.kv_bytes_per_token + self.tree.num_states * self.costs.state_bytes

    def serve(self, request: Request) -> int:
        """Begin and finish `request` at its arrival; returns the tokens that it did not have to compute."""
        lease = self.begin(request, request.arrival_s)
        self.finish(lease, request.arrival_s)
        return lease.match.checkpoint.depth

    def match(self, request: Request) -> Match:
        """What is known of `request`, and where it would start from: the last prompt token is always computed."""
        return self.tree.match(self._path(request), request.num_prompt_tokens - 1, request.namespace)

    def begin(self, request: Request, now_s: float) -> Lease:
        """Match `request` and lock the state it starts from."""
        match = self.match(request)
        lease = Lease(request, match)
        self.eviction.arrived(lease, now_s)
        counters, node = self.counters, match.checkpoint
        counters.num_requests += 1
        counters.num_prompt_tokens += request.num_prompt_tokens
        if node.parent is not None:
            counters.num_hit_tokens += node.depth
            counters.num_states_hit += 1
            node.num_hits += 1
            node.last_hit_s = node.last_pass_s = now_s
            self.tree.lock(node)
            self._tell()
        return lease

    def finish(self, lease: Lease, now_s: float) -> None:
        """Leave the states of a request and evict until the budget is kept."""
        request, match = lease
        tree, source = self.tree, match.checkpoint
        if source.parent is not None:
            tree.unlock(source)
        wanted = self.admission.depths(request, match)
        depths = self._fitting(wanted)
        if depths:
            num_states = tree.num_states
            made = tree.insert(self._path(request), depths, request.namespace)
            self.counters.num_states_written += tree.num_states - num_states
            for node in made:
                node.last_hit_s = node.last_pass_s = now_s
                tree.changed.append(node)
            self.eviction.admitted(made, lease, now_s)
            if self.eviction.spares_newest:
                tree.lock(made[-1])
                self._tell()
                fits = self._shrink(now_s)
                tree.unlock(made[-1])
            else:
                fits = False
            self._tell()
            if not fits:
                self._shrink(now_s)
        elif wanted:
            self.counters.num_too_large += 1
        self._tell()

    def _path(self, request: Request) -> bytes:
        return request.path[: request.num_known_tokens // self.tree.unit_tokens * ID_BYTES]

    def _fitting(self, depths: Sequence[int]) -> Sequence[int]:
        """The deepest of `depths`, as many as fit beside the KV; none if not even one does."""
        if not depths:
            return depths
        kv_bytes = depths[-1] * self.costs.kv_bytes_per_token
        if isinstance(self.budget, JointBudget):
            spare_bytes = self.budget.num_bytes - kv_bytes
        else:
            spare_bytes = self.budget.state_bytes if kv_bytes <= self.budget.kv_bytes else -1
        if spare_bytes < 0:
            return ()
        if spare_bytes >= len(depths) * self.costs.state_bytes:
            return depths
        return depths[len(depths) - spare_bytes // self.costs.state_bytes :]

    def _short_of(self) -> Need | None:
        if isinstance(self.budget, JointBudget):
            return Need.BYTES if self.num_bytes > self.budget.num_bytes else None
        if self.tree.num_tokens * self.costs.kv_bytes_per_token > self.budget.kv_bytes:
            return Need.KV
        return Need.STATE if self.tree.num_states * self.costs.state_bytes > self.budget.state_bytes else None

    def _shrink(self, now_s: float) -> bool:
        """Evict until the budget is kept; False if everything else is locked."""
        counters = self.counters
        while (need := self._short_of()) is not None:
            victim = self.eviction.victim(need, now_s)
            if victim is None:
                return False
            assert isinstance(victim, Node)
            self.eviction.evicting(victim, now_s)
            freed = self.tree.evict(victim)
            counters.num_evictions[need] += 1
            counters.num_evicted_tokens += freed.num_tokens
            self._tell()
        return True

    def _tell(self) -> None:
        """Pass the tree's changes on to the eviction rule."""
        eviction, max_children = self.eviction, self._max_children
        for node in dict.fromkeys(self.tree.changed):
            if node.has_state and not node.num_locks and node.num_live_children <= max_children:
                eviction.update(node)
            else:
                eviction.discard(node)
        self.tree.changed.clear()
