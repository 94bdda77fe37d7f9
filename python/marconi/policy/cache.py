"""A prefix cache: a tree, an admission rule, an eviction rule and a budget, driven by requests.

A request begins by matching, which locks the state it starts from, and finishes by leaving its states, after which the
eviction rule names victims until the budget is kept. Where a rule `spares_newest`, the deepest state that a request
has just left is the victim of its own finish only if everything else is in use. Where not all of a request's states
fit beside its KV the shallow ones are not left; a request whose KV and one state exceed the budget is served and
counted, and leaves nothing.

A server has no budget but memory that is taken while requests run: `served.py`, with the same rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from marconi.policy.admission.base import Admission
from marconi.policy.eviction.base import Costs, Eviction, Need
from marconi.policy.lease import Lease
from marconi.policy.ranked_tree import RankedTree
from marconi.policy.request import Request
from marconi.tree import RadixTree


@dataclass(frozen=True, slots=True)
class JointBudget:
    """One pool for KV and states."""

    num_bytes: int

    def __post_init__(self) -> None:
        """Raise `ValueError` unless there is memory."""
        if self.num_bytes < 1:
            raise ValueError(f"memory must be more than 0 bytes, got {self.num_bytes}")


@dataclass(frozen=True, slots=True)
class SplitBudget:
    """A pool for KV and a pool for states."""

    kv_bytes: int
    state_bytes: int

    def __post_init__(self) -> None:
        """Raise `ValueError` unless both pools have memory."""
        if self.kv_bytes < 1 or self.state_bytes < 1:
            raise ValueError(f"each pool must have more than 0 bytes, got {self.kv_bytes} and {self.state_bytes}")


Budget: TypeAlias = JointBudget | SplitBudget


class PrefixCache(RankedTree):
    """Serves requests; all times are passed in, in seconds."""

    def __init__(self, tree: RadixTree, admission: Admission, eviction: Eviction, costs: Costs, budget: Budget) -> None:
        """A cache of what `tree` holds; `eviction` knows no node yet and is told of those that the tree has noted."""
        super().__init__(tree, eviction)
        self.admission = admission
        self.costs = costs
        self.budget = budget

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.tree.num_tokens * self.costs.kv_bytes_per_token + self.tree.num_states * self.costs.state_bytes

    def serve(self, request: Request) -> int:
        """Begin and finish `request` at its arrival; returns the tokens that it did not have to compute."""
        lease = self.begin(request, request.arrival_s)
        self.finish(lease, request.arrival_s)
        return lease.match.checkpoint.depth

    def leave(self, lease: Lease, depths: Sequence[int], now_s: float) -> None:
        """Leave states of a request that runs at `depths`, rising, beyond what it started from, ahead of its finish."""
        if self._fitting(depths):
            self.insert(lease, depths, now_s)
            self.tell()
            self._shrink(now_s)

    def finish(self, lease: Lease, now_s: float) -> None:
        """Leave the states of a request and evict until the budget is kept."""
        tree, source = self.tree, lease.source
        if source is not None:
            tree.unlock(source)
        wanted = self.admission.depths(*lease)
        depths = self._fitting(wanted)
        if depths:
            newest = self.insert(lease, depths, now_s)[-1]
            if self.eviction.spares_newest:
                tree.lock(newest)
                self.tell()
                fits = self._shrink(now_s)
                tree.unlock(newest)
            else:
                fits = False
            self.tell()
            if not fits:
                self._shrink(now_s)
        elif wanted:
            self.counters.num_too_large += 1
        self.tell()

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
