"""A served tree whose memory is a budget of bytes, kept after each request: what eviction rules are tried on.

A server takes memory while requests run (`marconi.replay.server`), which hides what a rule does behind what running
takes. Here a request begins, finishes by leaving the states that its admission names, and only then does the bare
rule, without the tiers of a server, name victims until the budget is kept. The deepest state that a request has just
left is the victim of its own finish only if everything else is in use, unless `spares_newest` is false. Where not all
of a request's states fit beside its KV the shallow ones are not left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from marconi.policy.admission.base import Admission
from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease, Request
from marconi.tree import Freed, Node, RadixTree


@dataclass(frozen=True, slots=True)
class JointBudget:
    """One pool for KV and states."""

    num_bytes: int


@dataclass(frozen=True, slots=True)
class SplitBudget:
    """A pool for KV and a pool for states."""

    kv_bytes: int
    state_bytes: int


Budget: TypeAlias = JointBudget | SplitBudget


class BudgetCache(HybridCache):
    """Serves requests; all times are passed in, in seconds."""

    def __init__(
        self,
        tree: RadixTree,
        admission: Admission,
        eviction: Eviction,
        costs: Costs,
        budget: Budget,
        *,
        spares_newest: bool = True,
    ) -> None:
        self.costs = costs
        self.budget = budget
        self.spares_newest = spares_newest
        super().__init__(tree, admission, Order(eviction))

    @property
    def eviction(self) -> Eviction:
        """The rule."""
        return self.order.rule

    @eviction.setter
    def eviction(self, rule: Eviction) -> None:
        self.order.rule = rule

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.tree.num_tokens * self.costs.kv_bytes_per_token + self.tree.num_states * self.costs.state_bytes

    def serve(self, request: Request) -> int:
        """Begin and finish `request` at its arrival; returns the tokens that it did not have to compute."""
        lease = self.start(request, request.arrival_s)
        self.finish(lease, request.arrival_s)
        return lease.match.checkpoint.depth

    def start(self, request: Request, now_s: float) -> Lease:
        """Match `request`, and touch and lock the state that it starts from."""
        lease = Lease(request, self.match(request))
        if lease.match.source is not None:
            self.lock(lease.match.source)
        self.begin(lease, now_s)
        return lease

    def finish(self, lease: Lease, now_s: float) -> None:
        """Leave the states of a request and evict until the budget is kept."""
        if lease.match.source is not None:
            self.tree.unlock(lease.match.source)
        wanted = self.admission.depths(*lease)
        depths = self._fitting(wanted)
        fits, made = False, list[Node]()
        if depths:
            made = self._insert(lease, depths, now_s, None)
            if self.spares_newest:
                self.tree.lock(made[-1])
                self._rerank(made)
                fits = self._shrink(now_s)
                self.tree.unlock(made[-1])
        elif wanted:
            self.counters.num_too_large += 1
        self._rerank(made)
        if depths and not fits:
            self._shrink(now_s)

    def evict(self, need: Need, now_s: float) -> Freed | None:
        """Evict what the rule names; None if it names nothing."""
        victim = self.eviction.victim(need, now_s)
        return None if victim is None else self.evict_node(victim, need, now_s)

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
        while (need := self._short_of()) is not None:
            if self.evict(need, now_s) is None:
                return False
        return True
