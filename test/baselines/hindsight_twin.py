"""Hindsight by its definition: every later request is looked at, and every candidate for a victim."""

import math
import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from hypothesis import strategies as st

from marconi.policy.base import Costs, Eviction, Need, NodeView
from marconi.policy.request import Lease, Request, Trace, pack
from marconi.tree import Match, Node, RadixTree
from marconi.tree.node import ID_BYTES
from marconi_lab.hindsight.belady import BeladyEviction
from marconi_lab.hindsight.future import Future
from policy.random_runs import (
    PAUSES_S,
    WORLDS,
    Extent,
    Watched,
    depth_above,
    lengths,
    random_requests,
    serve_overlapping,
    sources,
)
from rig.budget_cache import BudgetCache, JointBudget


def next_uses(tree: RadixTree, requests: Sequence[Request], now: int) -> dict[Node, float]:
    """Of every state, the next request that would start from it were nothing to change; units are tokens."""
    found = {node: math.inf for node in tree.nodes() if node.has_state}
    for index in range(now + 1, len(requests)):
        state = deepest_state(tree, requests[index])
        if state is not None and math.isinf(found[state]):
            found[state] = float(index)
    return found


def deepest_state(tree: RadixTree, request: Request) -> Node | None:
    """Within what is known of the request, and with a token of the prompt left to compute."""
    limit = min(request.num_prompt_tokens - 1, request.num_known_tokens)
    node, deepest = tree.roots.get(request.namespace), None
    while node is not None and node.depth <= limit:
        if node.has_state:
            deepest = node
        start = node.depth * ID_BYTES
        node = next((child for child in node.children.values() if request.path.startswith(child.key, start)), None)
    return deepest


class WatchedHindsight(Watched):
    """A rule of whose victims one in `every` is compared, and with it the next use of every state."""

    def __init__(self, rule: BeladyEviction, tree: RadixTree, future: Future, key: "Definition", every: int) -> None:
        super().__init__(rule)
        self.belady = rule
        self.tree = tree
        self.future = future
        self.key = key
        self.every = every
        self.now = -1
        self.num_next_uses = 0

    def arrived(self, lease: Lease, now_s: float) -> None:
        self.now += 1
        super().arrived(lease, now_s)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        found = self.rule.victim(need, now_s)
        self.num_victims += 1
        if self.num_victims % self.every:
            return found
        order = []
        for node, expected in next_uses(self.tree, self.future.requests, self.now).items():
            assert self.belady.next_use(node) == expected, f"next use of {node}"
            self.num_next_uses += not math.isinf(expected)
            if not node.num_locks and not (need is Need.KV and node.num_children):
                order.append((self.key(node, expected), node.serial, node))
        right = min(order)[2] if order else None
        assert found is right, f"{found} went, {right} is right"
        return found


class Definition:
    """What goes first, of a node and the index of its next use: the furthest, or of those never used the largest."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def __call__(self, node: Node, next_used: float) -> tuple[float, ...]:
        return -next_used, -float(self.costs.freed_bytes(node)) if math.isinf(next_used) else 0.0


class TailDefinition(Definition):
    """What the next prompt is in time without, or what none comes for, the largest first; then the furthest."""

    def __init__(self, costs: Costs, future: Future, xi: int) -> None:
        super().__init__(costs)
        self.future = future
        self.xi = xi
        self.num_spared = 0

    def __call__(self, node: Node, next_used: float) -> tuple[float, ...]:
        if not math.isinf(next_used):
            prompt = self.future.requests[int(next_used)].num_prompt_tokens
            if prompt - depth_above(node) > self.xi:
                return 1.0, -next_used
            self.num_spared += 1
        return 0.0, -float(self.costs.freed_bytes(node))


Make: TypeAlias = Callable[[Costs, Future, frozenset[Need]], tuple[BeladyEviction, Definition]]


def served(
    make: Make, world: str, every: int, source: random.Random | int, length: int, num_running: int
) -> WatchedHindsight:
    """A rule after random requests, which may overlap."""
    costs, budget, admission, needs = WORLDS[world]
    trace = Trace("random", 1, tuple(random_requests(source, length)))
    tree, future = RadixTree(max_ghosts=30), Future(trace)
    rule, definition = make(costs, future, needs)
    watched = WatchedHindsight(rule, tree, future, definition, every)
    cache = BudgetCache(tree, admission, watched, costs, budget)
    serve_overlapping(cache, trace.requests, source, num_running, PAUSES_S if num_running > 1 else (0.0,))
    return watched


def compare(extent: Extent, make: Make) -> None:
    """Fail where victims or next uses differ in a drawn run, and unless many are compared."""

    def next_uses(world: str, source: random.Random, length: int, num_running: int) -> int:
        return served(make, world, extent.every, source, length, num_running).num_next_uses

    num = extent.draw(next_uses, WORLDS, source=sources, length=lengths, num_running=st.sampled_from((1, 3)))
    assert num > 200 * extent.num_runs


class Items:
    """Prompts of two tokens that share nothing: the state after the first token serves the same prompt again."""

    costs = Costs(kv_bytes_per_token=0, state_bytes=1, flops=float)

    def __init__(self, sequence: Sequence[int]) -> None:
        self.sequence = sequence
        requests = (Request(pack([item, item]), 2, 0, 2, float(now)) for now, item in enumerate(sequence))
        self.trace = Trace("items", 1, tuple(requests))

    plans_ahead = False
    grid_tokens = 1

    def depths(self, request: Request, match: Match) -> Sequence[int]:
        """As an admission rule."""
        return () if match.checkpoint.depth else (1,)


def hits_of(items: Items, rule: Eviction, num_places: int) -> int:
    """Hits with room for `num_places` states."""
    cache = BudgetCache(RadixTree(), items, rule, items.costs, JointBudget(num_places), spares_newest=False)
    return sum(cache.serve(request) for request in items.trace.requests)


def most_hits(sequence: Sequence[int], num_places: int) -> int:
    """The most that any choice of what to keep could have, over all sets that could be held after each request."""
    hits: dict[frozenset[int], int] = {frozenset(): 0}
    for item in sequence:
        reached: dict[frozenset[int], int] = {}
        for held, num_hits in hits.items():
            num_now = num_hits + (item in held)
            with_item = held | {item}
            choices = [held, with_item, *(with_item - {other} for other in with_item)]
            for kept in choices:
                if len(kept) <= num_places:
                    reached[kept] = max(reached.get(kept, -1), num_now)
        hits = reached
    return max(hits.values())
