"""Drawn runs of a prefix cache in which victims are compared with those chosen naively from a rule's definition."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from marconi.policy.admission.base import Admission
from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Eviction, Need, NodeView
from marconi.policy.forecast.hazard import Floats
from marconi.policy.request import Lease, Request, pack
from marconi.replay.admission.every_block import EveryBlock
from marconi.tree import Node, RadixTree, check_invariants
from rig.budget_cache import Budget, BudgetCache, JointBudget, SplitBudget

KV_COSTS = Costs(kv_bytes_per_token=1, state_bytes=0, flops=lambda num_tokens: 10.0 * num_tokens + num_tokens**2)
HYBRID_COSTS = Costs(kv_bytes_per_token=1, state_bytes=40, flops=lambda num_tokens: 10.0 * num_tokens + num_tokens**2)
SPLIT = frozenset({Need.KV, Need.STATE})


@dataclass
class NaiveConversations:
    """Which conversation a state belongs to, from full knowledge of who left what, with lists and scans."""

    members: list[list[Node]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    of: dict[Node, int] = field(default_factory=dict)
    extended_by: list[list[Request]] = field(default_factory=list)
    growths: list[tuple[int, int]] = field(default_factory=list)
    """(conversation, tokens by which a prompt went beyond its length), in order."""
    num_growths_when_extended: dict[int, int] = field(default_factory=dict)
    uses: list[Node] = field(default_factory=list)
    """Nodes hit or left, in order."""
    held: set[Node] = field(default_factory=set)
    """Nodes whose state was held when the current request came, or that it has left."""

    def members_held(self, index: int) -> list[Node]:
        """States of a conversation, shallowest first."""
        members = [node for node in self.members[index] if node in self.held and self.of[node] == index]
        return sorted(members, key=lambda node: node.depth)

    def deepest_held(self, index: int) -> Node | None:
        return self.members_held(index)[-1] if self.members_held(index) else None

    def hit(self, node: Node, request: Request) -> None:
        self.uses.append(node)
        index = self.of[node]
        grown = request.num_prompt_tokens - self.lengths[index]
        if self.deepest_held(index) is node and grown > 0:
            self.growths.append((index, grown))

    def left(self, node: Node, before: Node | None, request: Request) -> None:
        self.uses.append(node)
        if node in self.held:
            return
        index = None
        if before is not None and self.deepest_held(self.of[before]) is before:
            index = self.of[before]
        if index is None:
            index = len(self.members)
            self.members.append([])
            self.lengths.append(0)
            self.extended_by.append([])
        self.members[index] = [member for member in self.members[index] if member is not node] + [node]
        self.of[node] = index
        self.held.add(node)
        self.lengths[index] = node.depth
        self.extended_by[index].append(request)
        self.num_growths_when_extended[index] = len(self.growths)


Choose = Callable[[list[Node], Need, float, NaiveConversations], Node]


def state_above(node: Node) -> Node | None:
    """The nearest shallower state."""
    above = node.parent
    while above is not None and not above.has_state:
        above = above.parent
    return above


def depth_above(node: Node) -> int:
    """Depth of the nearest shallower state."""
    above = state_above(node)
    return 0 if above is None else above.depth


def free_then_lru(is_free: Callable[[Node, NaiveConversations], bool]) -> Choose:
    """Free nodes first, each side by last pass and, of one time, depth."""

    def choose(candidates: list[Node], need: Need, now_s: float, conversations: NaiveConversations) -> Node:
        return min(candidates, key=lambda n: (not is_free(n, conversations), n.last_pass_s, -n.depth, n.serial))

    return choose


def last_pass(candidates: list[Node], need: Need, now_s: float, conversations: NaiveConversations) -> Node:
    return min(candidates, key=lambda node: (node.last_pass_s, node.serial))


def last_hit(candidates: list[Node], need: Need, now_s: float, conversations: NaiveConversations) -> Node:
    return min(candidates, key=lambda node: (node.last_hit_s, node.serial))


class Watched(Eviction):
    """A rule to which all is passed on, and whose victims may be looked at."""

    def __init__(self, rule: Eviction) -> None:
        self.rule = rule
        self.scope = rule.scope
        self.num_victims = 0

    def arrived(self, lease: Lease, now_s: float) -> None:
        self.rule.arrived(lease, now_s)

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        self.rule.admitted(nodes, lease, now_s)

    def evicting(self, node: NodeView, now_s: float) -> None:
        self.rule.evicting(node, now_s)

    def update(self, node: NodeView) -> None:
        self.rule.update(node)

    def discard(self, node: NodeView) -> None:
        self.rule.discard(node)

    def worths(self, nodes: Sequence[NodeView], now_s: float) -> Floats:
        return self.rule.worths(nodes, now_s)


class Compared(Watched):
    """A rule of whose victims one in `every` is compared."""

    def __init__(self, rule: Eviction, tree: RadixTree, choose: Choose, every: int = 1) -> None:
        super().__init__(rule)
        self.tree = tree
        self.choose = choose
        self.every = every
        self.conversations = NaiveConversations()

    def arrived(self, lease: Lease, now_s: float) -> None:
        self.conversations.held = {node for node in self.tree.nodes() if node.has_state}
        if lease.match.source is not None:
            self.conversations.hit(lease.match.source, lease.request)
        super().arrived(lease, now_s)

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        for node in nodes:
            assert isinstance(node, Node)
            self.conversations.left(node, state_above(node), lease.request)
        super().admitted(nodes, lease, now_s)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        victim = self.rule.victim(need, now_s)
        self.num_victims += victim is not None
        if victim is not None and self.num_victims % self.every:
            return victim
        candidates = [
            node
            for node in self.tree.nodes()
            if node.has_state
            and not node.num_locks
            and node.num_children <= (0 if need is Need.KV else self.scope.value)
        ]
        if not candidates:
            assert victim is None
            return None
        self.conversations.held = {node for node in self.tree.nodes() if node.has_state}
        expected = self.choose(candidates, need, now_s, self.conversations)
        assert victim is expected, f"{victim} went, {expected} is right, of {candidates}"
        return victim


def random_ids(rng: random.Random, num: int, num_letters: int = 3) -> list[int]:
    """Drawn, and shrunk, as one number."""
    number = rng.randrange(num_letters**num)
    return [number // num_letters**place % num_letters for place in range(num)]


def random_requests(source: random.Random | int, num_requests: int = 100) -> list[Request]:
    """Sessions over few ids that share prompts, go on, go back, repeat themselves and come at equal times."""
    rng = random.Random(source) if isinstance(source, int) else source  # noqa: S311 - test data

    shared = [random_ids(rng, rng.randrange(4, 20)) for _ in range(3)]
    histories: list[list[int]] = []
    turns: list[int] = []
    requests = []
    now_s = 0.0
    for _ in range(num_requests):
        now_s += rng.choice((0.0, 1.0, 1.0, 5.0))
        if not histories or rng.random() < 0.25:
            histories.append(list(rng.choice(shared)) if rng.random() < 0.7 else [])
            turns.append(-1)
        session = rng.randrange(len(histories)) if rng.random() < 0.3 else max(0, len(histories) - rng.randrange(1, 4))
        if rng.random() < 0.1:
            del histories[session][rng.randrange(len(histories[session]) + 1) :]
        added = 0 if rng.random() < 0.05 and histories[session] else rng.randrange(1, 15)
        prompt = histories[session] + random_ids(rng, added)
        output = random_ids(rng, rng.randrange(0, 10))
        histories[session] = prompt + output
        turns[session] += 1
        path = pack(prompt + output)
        requests.append(Request(path, len(prompt), len(output), len(prompt + output), now_s, session, turns[session]))
    return requests


def run(
    rule: Eviction,
    choose: Choose,
    requests: Sequence[Request],
    costs: Costs = KV_COSTS,
    budget: Budget | None = None,
    admission: Admission | None = None,
    every: int = 1,
    max_ghosts: int = 30,
) -> int:
    """Serve `requests` and compare one victim in `every`; returns how many there were."""
    tree = RadixTree(max_ghosts=max_ghosts)
    watched = Compared(rule, tree, choose, every)
    cache = BudgetCache(
        tree, EveryBlock(1) if admission is None else admission, watched, costs, budget or JointBudget(120)
    )
    for request in requests:
        cache.serve(request)
    check_invariants(tree)
    return watched.num_victims


WORLDS: dict[str, tuple[Costs, Budget, Admission, frozenset[Need]]] = {
    "attention": (KV_COSTS, JointBudget(120), EveryBlock(1), frozenset({Need.BYTES})),
    "hybrid": (HYBRID_COSTS, JointBudget(600), Judicious(least_tokens=1), frozenset({Need.BYTES})),
    "hybrid-grid": (HYBRID_COSTS, JointBudget(900), EveryBlock(5), frozenset({Need.BYTES})),
    "hybrid-split": (HYBRID_COSTS, SplitBudget(kv_bytes=150, state_bytes=320), Judicious(least_tokens=1), SPLIT),
}
"""Costs, budget, admission and needs of the kinds of cache that a rule is tried in."""


class Extent(NamedTuple):
    """How much is drawn, and how often what is expensive is compared."""

    num_runs: int
    """Of each kind, beside the simplest one."""
    every: int
    phases: tuple[Phase, ...] = (Phase.generate,)
    """Without shrinking, which takes minutes, a run that fails is reported at once."""

    def draw(self, test: Callable[..., int], kinds: Iterable[Any], **strategies: st.SearchStrategy[Any]) -> int:
        """Run `test` on each of `kinds` with drawn arguments; returns the sum of what it counts."""
        num = 0
        for kind in kinds:

            @settings(max_examples=1 + self.num_runs, phases=self.phases)
            @given(**strategies)
            def drawn(**arguments: Any) -> None:
                nonlocal num
                num += test(kind, **arguments)  # noqa: B023 - it is called within the loop

            drawn()
        return num


extents = pytest.mark.parametrize(
    "extent",
    [Extent(3, 4), pytest.param(Extent(12, 1, tuple(Phase)), marks=pytest.mark.slow)],
    ids=["quick", "thorough"],
)
"""The two extents that a comparison is made in."""


sources = st.randoms(use_true_random=False)
"""Of requests: all that is drawn from one shrinks."""
lengths = st.integers(30, 80)
"""Requests of a run."""


def compare(
    extent: Extent,
    make: Callable[..., tuple[Eviction, Choose]],
    worlds: Iterable[str] = WORLDS,
    **parameters: Sequence[Any],
) -> None:
    """Fail where victims differ in drawn worlds, and unless the runs evict often.

    `make` is given costs, needs, requests and one of each of `parameters`.
    """

    def victims(world: str, source: random.Random, length: int, max_ghosts: int, **chosen: Any) -> int:
        costs, budget, admission, needs = WORLDS[world]
        requests = random_requests(source, length)
        rule, choose = make(costs, needs, requests, **chosen)
        return run(rule, choose, requests, costs, budget, admission, extent.every, max_ghosts)

    num_victims = extent.draw(
        victims,
        worlds,
        source=sources,
        length=lengths,
        max_ghosts=st.sampled_from((30, 5, 0)),
        **{name: st.sampled_from(values) for name, values in parameters.items()},
    )
    assert num_victims > 20 * extent.num_runs, "the runs hardly evicted"


PAUSES_S = (0.0, 0.5, 3.0)


def serve_overlapping(
    cache: BudgetCache,
    requests: Sequence[Request],
    source: random.Random | int,
    num_running: int,
    pauses_s: Sequence[float] = PAUSES_S,
) -> None:
    """Up to `num_running` requests at a time, begun in order and finished in any, one of `pauses_s` before each end."""
    rng = random.Random(source) if isinstance(source, int) else source  # noqa: S311 - test data
    running: list[Lease] = []
    now_s = 0.0
    for request in requests:
        now_s = max(now_s, request.arrival_s)
        running.append(cache.start(request, now_s))
        while running and (len(running) >= num_running or rng.random() < 0.4):
            now_s += rng.choice(pauses_s)
            cache.finish(running.pop(rng.randrange(len(running))), now_s)
            check_invariants(cache.tree)
    while running:
        cache.finish(running.pop(), now_s)
