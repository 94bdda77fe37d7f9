"""The memory that running requests and the prefix cache share.

A running request owns the KV of all tokens that it computes, its answer's included, and one state to work on; both
are set aside when it starts. It also locks, in the cache, the path that it started from. What is left is the cache's:

    cache budget = memory - owned by running requests       and at all times   owned + locked <= memory

A request starts only where that holds with it; where nothing runs, the next one always starts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from marconi.policy.admission.base import num_processed_tokens
from marconi.policy.cache import Budget, JointBudget, SplitBudget
from marconi.policy.eviction.base import Costs
from marconi.policy.request import Request
from marconi.replay.policies.cache import ReplayCache
from marconi.tree import Node


@dataclass(frozen=True, slots=True)
class Claim:
    """Tokens of KV and states, by whomever held."""

    num_tokens: int = 0
    num_states: int = 0

    def __add__(self, other: "Claim") -> "Claim":
        return Claim(self.num_tokens + other.num_tokens, self.num_states + other.num_states)

    def __sub__(self, other: "Claim") -> "Claim":
        return Claim(self.num_tokens - other.num_tokens, self.num_states - other.num_states)


class Room:
    """Keeps count of what running requests own, and the cache's budget in step with it."""

    def __init__(self, cache: ReplayCache) -> None:
        self._cache = cache
        self._memory = cache.budget
        self._owned = Claim()

    @staticmethod
    def claim(request: Request, num_hit_tokens: int) -> Claim:
        """What `request` owns while it runs."""
        return Claim(num_processed_tokens(request) - num_hit_tokens, 1)

    def has(self, claim: Claim, in_use: Iterable[Node]) -> bool:
        """Whether `claim` fits beside what runs, if need be by evicting all but the paths of the nodes `in_use`."""
        owned, tree = self._owned + claim, self._cache.tree
        if _holds(self._memory, owned + Claim(tree.num_tokens, tree.num_states), self._cache.costs):
            return True
        return _holds(self._memory, owned + _paths(in_use), self._cache.costs)

    def take(self, claim: Claim, now_s: float) -> None:
        """Set `claim` aside; the cache evicts what it no longer has room for."""
        self._owned += claim
        self._cache.resize(self._left(), now_s)

    def give_back(self, claim: Claim) -> None:
        """The cache may hold that much more."""
        self._owned -= claim
        self._cache.budget = self._left()

    def _left(self) -> Budget:
        owned, costs = self._owned, self._cache.costs
        kv_bytes = owned.num_tokens * costs.kv_bytes_per_token
        state_bytes = owned.num_states * costs.state_bytes
        if isinstance(self._memory, JointBudget):
            return JointBudget(max(1, self._memory.num_bytes - kv_bytes - state_bytes))
        return SplitBudget(max(1, self._memory.kv_bytes - kv_bytes), max(1, self._memory.state_bytes - state_bytes))


def _holds(memory: Budget, claim: Claim, costs: Costs) -> bool:
    kv_bytes, state_bytes = claim.num_tokens * costs.kv_bytes_per_token, claim.num_states * costs.state_bytes
    if isinstance(memory, JointBudget):
        return kv_bytes + state_bytes <= memory.num_bytes
    return kv_bytes <= memory.kv_bytes and state_bytes <= memory.state_bytes


def _paths(nodes: Iterable[Node]) -> Claim:
    """What lies on the paths from the root to `nodes`, once each."""
    seen: set[Node] = set()
    num_tokens = num_states = 0
    for end in nodes:
        node = end
        while node.parent is not None and node not in seen:
            seen.add(node)
            num_tokens += node.depth - node.parent.depth
            num_states += node.has_state
            node = node.parent
    return Claim(num_tokens, num_states)
