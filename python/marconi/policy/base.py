"""The contract of an eviction rule: it ranks the evictable nodes and names the victim.

A rule sees a node through `NodeView` only, so that another tree than ours can stand behind it. Who drives the tree
(`policy/hybrid_cache.py`) tells the rule of every node whose facts may have changed (`update` while it is evictable,
`discard` once it is not), of requests, and of the states that they leave and that are evicted. From that a rule
maintains its order and never scans the tree: a victim costs O(log n).

Memory may be one pool or two (KV and states), so a rule is asked for a victim with a `Need`. Evicting a node without
live children frees its state and its KV; evicting one with children frees its state only, so it serves `Need.STATE`
and, in one pool, `Need.BYTES`, but never `Need.KV`.

Of equal nodes the one made first is evicted, unless a rule says otherwise.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import ClassVar, NamedTuple, Protocol, TypeVar

from marconi.policy.forecast.hazard import Floats
from marconi.policy.forecast.turns import DivergenceWindow, Turns
from marconi.policy.request import Lease
from marconi.tree import LeftBy


class NodeView(Protocol):
    """A node with a state, as a rule sees it. Depths and counts are in tokens, times in seconds."""

    @property
    def serial(self) -> int:
        """Order of creation, unique."""
        ...

    @property
    def depth(self) -> int:
        """Tokens that the state stands for."""
        ...

    @property
    def checkpoint_depth_above(self) -> int:
        """Depth of the nearest shallower state on the path; 0 if none."""
        ...

    @property
    def lasting_depth_above(self) -> int:
        """The same of states that are not on trial."""
        ...

    @property
    def state_above(self) -> "NodeView | None":
        """The nearest shallower state on the path; None if there is none."""
        ...

    @property
    def state_below(self) -> "NodeView | None":
        """The nearest deeper state, where there is only one path below; None if there is none."""
        ...

    @property
    def freed_tokens(self) -> int:
        """Tokens of KV that its eviction frees."""
        ...

    @property
    def last_hit_s(self) -> float:
        """When the state was made or last started from."""
        ...

    @property
    def last_pass_s(self) -> float:
        """When a request last ran through."""
        ...

    @property
    def num_hits(self) -> int:
        """Requests that started from the state."""
        ...

    @property
    def num_children(self) -> int:
        """Live children."""
        ...

    @property
    def num_proven_children(self) -> int:
        """Live children but ends of answers that were passed over: 0, 1, or 2 for several, of the first few."""
        ...

    @property
    def is_passed_over(self) -> bool:
        """True if no request has started from the state, and one has continued its prompt from elsewhere."""
        ...

    @property
    def num_locks(self) -> int:
        """Requests that use it; while there are any it must stay."""
        ...

    @property
    def left_by(self) -> LeftBy | None:
        """The last request that left the state near the end of its prompt or beyond it."""
        ...

    @property
    def has_copy(self) -> bool:
        """True if another tier of memory holds its state as well."""
        ...

    @property
    def leaving(self) -> int | None:
        """Place among those that were chosen to be evicted next; None if it was not."""
        ...

    @property
    def on_trial(self) -> bool:
        """True if it was left on trial, and prompts have not parted there since."""
        ...

    @property
    def set_aside(self) -> bool:
        """True if it is retained and others were evicted in its place."""
        ...

    @property
    def first_waiting(self) -> int | None:
        """Place of the first request of the queue that would start from its state; None if none would."""
        ...


class Need(Enum):
    """The kind of memory that is short."""

    __hash__ = object.__hash__
    """An enumeration's own runs in Python, and victims and queues are looked up by need."""

    BYTES = "bytes"
    """One pool."""
    KV = "kv"
    STATE = "state"


class Scope(Enum):
    """Which nodes a rule evicts; the value is the largest number of live children."""

    LEAVES = 0
    SINGLE_CHILD = 1
    """Leaves and interior nodes on the way to one child."""
    ANY = 1 << 30


@dataclass(frozen=True, slots=True)
class Costs:
    """The memory that a checkpoint takes, and the FLOPs that it saves."""

    kv_bytes_per_token: int
    state_bytes: int
    flops: "PrefixFlops"

    def freed_bytes(self, node: NodeView) -> int:
        """Bytes that evicting `node` frees."""
        return node.freed_tokens * self.kv_bytes_per_token + self.state_bytes

    def saved_flops(self, node: NodeView) -> float:
        """FLOPs that `node` saves beyond the nearest shallower state on its path."""
        return self.flops(node.depth) - self.flops(node.checkpoint_depth_above)


class PrefixFlops(Protocol):
    """FLOPs to prefill the first `num_tokens` tokens."""

    def __call__(self, num_tokens: int, /) -> float:
        """FLOPs."""
        ...


class Role(IntEnum):
    """The use of a state to later requests."""

    END = 0
    """One of the last of a prompt or its answer that no request has continued."""
    PASSED = 1
    """Another one, once a request has."""
    WAYPOINT = 2
    """Left on the way, with one child."""
    BRANCH = 3
    """Several children."""


_T = TypeVar("_T")


def for_states(of_need: Mapping[Need, _T]) -> _T:
    """The entry for the memory that states take: their own pool's, else the one pool's; KV's if there is no other."""
    return of_need[min(of_need, key=lambda need: need is Need.KV)]


class PlannedState(NamedTuple):
    """A state that a request could leave."""

    lease: Lease
    depth: int
    """Tokens that it stands for."""
    role: Role
    share: float
    """The share of the prompt's continuations that would start from it, 0 to 1."""
    num_saved_tokens: int
    """Tokens beyond the next shallower state."""


class Eviction(ABC):
    """Ranks evictable nodes."""

    scope: ClassVar[Scope] = Scope.SINGLE_CHILD

    follows_ghosts: ClassVar[bool] = False
    """Whether `discard` is called as well for nodes that are not ranked and not in use, whenever they change."""
    turns: Turns | None = None
    """Where prompts are left, as the rule learns it; None if it does not."""
    guard: DivergenceWindow | None = None
    """How far before their ends paths are left, for an admission with guards; None if the rule does not learn it."""

    def for_copies(self, needs: frozenset[Need], saved: Callable[[NodeView, Need], float]) -> "Eviction | None":
        """A rule for copies on the host that shares what this one learns; None where one of its own does as well.

        `saved` is what a use of a copy saves, in seconds, by what is short.
        """
        return None

    @abstractmethod
    def update(self, node: NodeView) -> None:
        """`node` is evictable and within the scope, and anything about it may differ from before."""

    @abstractmethod
    def discard(self, node: NodeView) -> None:
        """`node` is no longer evictable, if it was."""

    @abstractmethod
    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The node to evict first for `need`; None if nothing is evictable. It stays ranked until discarded."""

    @abstractmethod
    def worths(self, nodes: Sequence[NodeView], now_s: float) -> Floats:
        """The keys of the order of states at `now_s`: a row for each of `nodes`, nan where it does not rank the node.

        Rows compare as tuples do; the least is evicted first, of equal ones the node made first. Their unit is the
        rule's own. The rule looks up what it has at hand, so that asking changes no victim.
        """

    def kept_instead(self, victim: NodeView, need: Need) -> tuple[NodeView, float] | None:
        """The state next in line behind `victim`, which was named last, and how many times as much it is worth.

        From what naming the victim computed, and it changes nothing: None if that says nothing, or of a rule whose
        ranks are no savings.
        """
        return None

    def outranks(self, planned: PlannedState, victim: NodeView, need: Need, now_s: float) -> bool:
        """True if a state that is only planned is worth more than `victim`.

        To a rule of recency the newest is, if it is likelier than not to be the one that is used.
        """
        return planned.share > 1 / 2

    def arrived(self, lease: Lease, now_s: float) -> None:  # noqa: B027 - most rules do not look at requests
        """A request has been looked up; said before the times and counts of what it starts from change."""

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:  # noqa: B027
        """A request has left states at `nodes`, in rising depth; some may have been held before."""

    def evicting(self, node: NodeView, now_s: float) -> None:  # noqa: B027
        """The state of `node` is about to be evicted, and its KV too if it has no live children."""
