"""The one driver of the policies: a tree, the order in which it is given up, and where requests leave states.

    match    what is known of a request, and the state that it would start from
    arrive   count the request, and touch that state
    plan     the positions whose states are kept                                             (`admission/plan.py`)
    leave    as the prefill passes them, and at the request's end: states and KV join the tree
    evict    whenever KV or states are short                                                (`eviction/`)
    load     back to the device what a host tier has a copy of                              (`host_tier.py`)

Memory is the caller's: the server's cache, or the replay that stands for it (`replay/server.py`), takes it while
requests run and asks for victims when it is short. Every change of the tree is passed on to the eviction rule at once
(`tell`), so that a victim is always one that may go.

A speculative state takes a slot that is spare, or one for which nothing must go that is worth more (`deserves`).

All times are passed in, in seconds.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from marconi.policy.admission.base import Admission
from marconi.policy.admission.plan import STEP_TOKENS, PrefillPlan, Wishes, prefill_plan
from marconi.policy.eviction.base import Need, NodeView, PlannedState, Role
from marconi.policy.eviction.tiers import TieredEviction
from marconi.policy.forecast.turns import NO_CLOSING, Turns
from marconi.policy.host_tier import Tier
from marconi.policy.request import Lease, Request
from marconi.policy.waiting import AwaitedStates
from marconi.tree import Freed, Match, Node, RadixTree


@dataclass(slots=True)
class Counters:
    """Counts of requests, states and tokens."""

    num_requests: int = 0
    num_too_large: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_states_written: int = 0
    num_states_hit: int = 0
    num_evictions: dict[Need, int] = field(default_factory=lambda: dict.fromkeys(Need, 0))
    num_evictions_unused: int = 0
    """Victims whose state no request had started from."""
    num_evicted_tokens: int = 0
    num_loads: int = 0
    """Requests that started from a copy on the host."""
    num_loaded_tokens: int = 0
    """Tokens whose KV was loaded for them."""
    load_s: float = 0.0
    """Seconds that it took."""


class Beyond(NamedTuple):
    """The part of a request's path after a node with a state that the request keeps in use."""

    node: Node
    path: bytes
    """Path from the node on, in whole units."""


class ServedTree:
    """A tree that serves requests by an admission rule and an eviction rule."""

    def __init__(
        self,
        tree: RadixTree,
        admission: Admission,
        tiers: TieredEviction,
        step_tokens: int = STEP_TOKENS,
        turns: Turns | None = None,
        host: Tier | None = None,
    ) -> None:
        """Drive `tree`; `tiers` knows no node yet and is told of those that the tree has noted.

        What is evicted is offered to `host`, if there is one.
        """
        self.tree = tree
        self.admission = admission
        self.tiers = tiers
        self.turns = turns or Turns(tree.unit_tokens)
        self.host = host
        self.awaited = AwaitedStates(tree)
        self.counters = Counters()
        self._step_tokens = step_tokens
        self._ranked: set[Node] = set()
        """Those that the rule was told to rank: of others it has to hear nothing while they are in use."""
        self.tell()

    def match(self, request: Request) -> Match:
        """Match `request`, and find the state that it would start from: the last prompt token is always computed."""
        return self.tree.match(self._path(request), request.num_prompt_tokens - 1, request.namespace)

    def arrive(self, lease: Lease, now_s: float) -> Lease:
        """Count a request that has been looked up, and touch the state that it starts from; the rule is not told."""
        request, match = lease
        left = match.last if self.turns.arrived(lease) is not None else match.checkpoint
        self.tiers.arrived(lease, now_s)
        self.tree.changed += self.turns.close(left)
        counters, node = self.counters, match.checkpoint
        counters.num_requests += 1
        counters.num_prompt_tokens += request.num_prompt_tokens
        if node.parent is not None:
            counters.num_hit_tokens += node.depth
            counters.num_states_hit += 1
            node.num_hits += 1
            node.last_hit_s = node.last_pass_s = now_s
            node.leaving = None
            self.tree.changed.append(node)
            if self.host is not None:
                self.host.resumed(request.num_prompt_tokens - node.depth)
        return lease

    def load(self, request: Request, depth: int, num_tokens: int) -> float:
        """Hold on the device what the host has of `request` up to `depth`; returns the seconds that it takes.

        `num_tokens` tokens of KV are not on the device yet.
        """
        assert self.host is not None
        self.tree.insert(self._path(request), [depth], request.namespace)
        load_s = self.host.load_s(num_tokens)
        self.counters.num_loads += 1
        self.counters.num_loaded_tokens += num_tokens
        self.counters.load_s += load_s
        self.tell()
        return load_s

    def plan(
        self,
        lease: Lease,
        asked: Sequence[int] = (),
        shared: Sequence[int] = (),
        known_distance: int | None = None,
    ) -> PrefillPlan:
        """Where a request that has begun leaves states, by an admission that plans ahead.

        `asked` are positions that the program named, `shared` those where requests that wait leave the prompt, the
        deepest first. `known_distance` is how far before the prompt's end its template's next turn leaves it. All are
        in tokens.
        """
        end = lease.request.num_prompt_tokens
        if end in asked and self._stands_at(end, lease.request):
            asked = [position for position in asked if position != end]
        turn = self.turns.next_turn(lease, known_distance)
        wishes = Wishes(asked, shared, turn, self.turns.is_usual(lease))
        return prefill_plan(self.admission, lease, self.tree.unit_tokens, self._step_tokens, wishes)

    def deserves(self, lease: Lease, depth: int, role: Role, granted: Set[int], need: Need, now_s: float) -> bool:
        """True if a state that is planned at `depth` is worth more than what would be evicted for it next.

        `granted` are the depths of the request's states that have a slot.
        """
        victim = self.tiers.victim(need, now_s)
        if victim is None or victim.first_waiting is not None:
            return False
        above = max((each for each in granted if each < depth), default=lease.match.checkpoint.depth)
        below = min((each for each in granted if each > depth), default=lease.request.num_prompt_tokens)
        share = self.turns.share(self.turns.prompt_end(lease), depth, below) if role is Role.END else 1.0
        planned = PlannedState(lease, depth, role, share, depth - above)
        return victim.leaving is not None or self.tiers.outranks(planned, victim, need, now_s)

    def leave(
        self,
        lease: Lease,
        depths: Sequence[int],
        now_s: float,
        beyond: Beyond | None = None,
        closing: int = NO_CLOSING,
    ) -> list[Node]:
        """Hold the path of `lease` up to the last of `depths`, rising, in tokens, and a state at each.

        `beyond` says where the request is already held to, so that only what comes after is looked at. `closing` says
        how the answer closed, at the request's end. Returns the nodes of the states.
        """
        made = self._insert(lease, depths, now_s, beyond)
        self.tree.changed += self.turns.note(made, lease, closing)
        if self.host is not None:
            self.host.left(lease.request, depths, now_s)
        self.tell()
        return made

    def evict(self, need: Need, now_s: float) -> Freed | None:
        """Give up what is worth least for `need`; None if nothing may go."""
        victim = self.tiers.victim(need, now_s)
        return None if victim is None else self.give_up(victim, need, now_s)

    def give_up(self, victim: NodeView, need: Need, now_s: float) -> Freed:
        """Evict `victim`, a node of this tree that the rule ranks, for `need`."""
        assert isinstance(victim, Node)
        if self.host is not None:
            self.host.offer(victim, now_s)
        self.tiers.evicting(victim, now_s)
        self.counters.num_evictions_unused += not victim.num_hits
        victim.leaving = None
        freed = self.tree.evict(victim)
        self.counters.num_evictions[need] += 1
        self.counters.num_evicted_tokens += freed.num_tokens
        self.tell()
        return freed

    def tell(self) -> None:
        """Pass the tree's changes on to the eviction rule."""
        tiers, ranked, changed, host = self.tiers, self._ranked, self.tree.changed, self.host
        for node in dict.fromkeys(changed):
            if node.has_state and not node.num_locks:
                ranked.add(node)
                tiers.update(node)
            elif node in ranked:
                ranked.remove(node)
                tiers.discard(node)
            elif not node.num_locks:
                tiers.discard(node)
            if host is not None:
                host.touch(node)
        changed.clear()

    def _insert(self, lease: Lease, depths: Sequence[int], now_s: float, beyond: Beyond | None) -> list[Node]:
        tree, request = self.tree, lease.request
        num_states = tree.num_states
        if beyond is None:
            made = tree.insert(self._path(request), depths, request.namespace)
        else:
            made = tree.insert(beyond.path, depths, request.namespace, beyond.node)
        self.counters.num_states_written += tree.num_states - num_states
        for node in made:
            node.last_hit_s = node.last_pass_s = now_s
            node.leaving = None
            tree.changed.append(node)
        self.tiers.admitted(made, lease, now_s)
        return made

    def _path(self, request: Request) -> bytes:
        tree = self.tree
        return request.path[: request.num_known_tokens // tree.unit_tokens * tree.unit_bytes]

    def _stands_at(self, depth: int, request: Request) -> bool:
        """True if there is a state after `depth` tokens of `request`.

        No match of the request finds the one at the end of its prompt: it could not start from there.
        """
        return self.tree.match(self._path(request), depth, request.namespace).checkpoint.depth == depth
