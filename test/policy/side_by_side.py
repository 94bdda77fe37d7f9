"""A cache and its brute-force twin, driven with the same random requests and compared at every step."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Eviction, Need, NodeView
from marconi.policy.request import Lease as CacheLease
from marconi.policy.request import Request, pack, unpack
from marconi.tree import Node, RadixTree, check_invariants
from rig.budget_cache import Budget, BudgetCache, JointBudget, SplitBudget

from .brute_force import BruteForceCache, Lease, TwinRule, TwinTree
from .brute_order import Order
from .random_runs import Watched, random_ids

COSTS = Costs(kv_bytes_per_token=3, state_bytes=20, flops=lambda num_tokens: num_tokens * (num_tokens + 10))
ONE_POOL = frozenset({Need.BYTES})
TWO_POOLS = frozenset({Need.KV, Need.STATE})
NUM_LETTERS = 3
MAX_UNITS = 12


@dataclass(frozen=True)
class Rule:
    """A rule and the definition that it is held against."""

    name: str
    eviction: Callable[[], Eviction]
    order: Callable[[], Order]
    needs: frozenset[Need] = ONE_POOL


@dataclass(frozen=True)
class Setting:
    """What a run varies beside the rule."""

    name: str
    unit_tokens: int
    max_ghosts: int
    num_running: int
    """Requests that may be running when another begins or finishes."""
    num_namespaces: int = 1
    units_per_grid: int = 1
    num_units: int = 40
    """What one pool holds, if it were KV alone; two pools are half of it each."""

    @property
    def grid_tokens(self) -> int:
        return self.units_per_grid * self.unit_tokens

    def budget(self, needs: frozenset[Need]) -> Budget:
        num_bytes = self.num_units * self.unit_tokens * COSTS.kv_bytes_per_token
        if needs is TWO_POOLS:
            return SplitBudget(kv_bytes=num_bytes // 2, state_bytes=6 * COSTS.state_bytes)
        return JointBudget(num_bytes + 6 * COSTS.state_bytes)


class Witness(Watched):
    """A rule whose victims are written down."""

    def __init__(self, rule: Eviction) -> None:
        super().__init__(rule)
        self.victims: list[str] = []

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        node = self.rule.victim(need, now_s)
        if node is not None:
            assert isinstance(node, Node)
            self.victims.append(word_of(node))
        return node


def word_of(node: Node) -> str:
    """The twin's word for a node; '?' stands for the namespace."""
    keys = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    return "?" + "".join(map(chr, unpack(b"".join(reversed(keys)))))


def requests(rng: random.Random, setting: Setting) -> Iterator[Request]:
    """Sequences that go on from, branch off and repeat earlier ones; some end inside a unit."""
    earlier: list[list[int]] = [[0]]
    now_s = 0.0
    while True:
        now_s += rng.randrange(1000) / 1000
        ids = list(rng.choice(earlier[-30:]))
        ids = ids[: rng.choice((len(ids), rng.randint(0, len(ids))))]
        ids += random_ids(rng, rng.choice((0, 1, 1, 2, 5)), NUM_LETTERS)
        ids = ids[:MAX_UNITS] or [0]
        earlier.append(ids)
        num_tokens = len(ids) * setting.unit_tokens - rng.randrange(setting.unit_tokens)
        num_output_tokens = rng.choice((0, 1, rng.randrange(num_tokens)))
        num_known_tokens = num_tokens // setting.unit_tokens * setting.unit_tokens
        yield Request(
            path=pack(ids),
            num_prompt_tokens=num_tokens - num_output_tokens or 1,
            num_output_tokens=num_output_tokens,
            num_known_tokens=num_known_tokens,
            arrival_s=now_s,
            namespace=rng.randrange(setting.num_namespaces),
        )


class SideBySide:
    """The cache and its twin, driven with the same requests."""

    def __init__(self, rule: Rule, setting: Setting) -> None:
        budget = setting.budget(rule.needs)
        eviction = rule.eviction()
        self.witness = Witness(eviction)
        tree = RadixTree(setting.unit_tokens, setting.max_ghosts)
        self.cache = BudgetCache(tree, Judicious(setting.grid_tokens, least_tokens=1), self.witness, COSTS, budget)
        twin_tree = TwinTree(setting.unit_tokens, setting.max_ghosts, setting.grid_tokens)
        twin_rule = TwinRule(rule.order(), eviction.scope.value)
        self.twin = BruteForceCache(twin_tree, twin_rule, COSTS, budget)
        self.running: list[tuple[CacheLease, Lease]] = []

    def begin(self, request: Request, now_s: float) -> None:
        lease = self.cache.start(request, now_s)
        twins = self.twin.begin(request, now_s)
        assert lease.match.checkpoint.depth == self.twin.depth(twins.checkpoint), "hit"
        self.running.append((lease, twins))

    def finish(self, index: int, now_s: float) -> None:
        lease, twins = self.running.pop(index)
        num_victims = len(self.twin.victims)
        self.witness.victims.clear()
        self.cache.finish(lease, now_s)
        self.twin.finish(twins, now_s)
        victims = ["?" + word[1:] for word, _ in self.twin.victims[num_victims:]]
        assert self.witness.victims == victims, "victims"
        assert self.cache.tree.num_tokens == self.twin.num_tokens, "KV held"
        assert self.cache.tree.num_states == len(self.twin.states), "states held"

    def check(self) -> None:
        """Every fact of every state, and the invariants of the tree."""
        tree = self.cache.tree
        check_invariants(tree)
        assert not tree._changed
        assert self.cache.num_bytes == (
            self.twin.num_tokens * COSTS.kv_bytes_per_token + len(self.twin.states) * COSTS.state_bytes
        )
        assert self.cache.counters.num_evicted_tokens == sum(num_tokens for _, num_tokens in self.twin.victims)
        held = {(root, word_of(node)): node for root in tree.roots for node in tree.roots[root].walk()}
        assert {key for key, node in held.items() if node.has_state} == {key_of(word) for word in self.twin.states}
        assert [word_of(ghost)[1:] for ghost in tree.ghosts] == [word[1:] for word in self.twin.ghosts]
        for view in self.twin.views():
            node = held[key_of(view.word)]
            facts = ("depth", "checkpoint_depth_above", "freed_tokens", "last_hit_s", "num_hits", "num_children")
            assert [getattr(node, fact) for fact in facts] == [getattr(view, fact) for fact in facts], view.word
            assert node.num_locks == view.num_locks
            if not node.num_children:
                assert node.last_pass_s == view.last_pass_s, f"last pass of {view.word}"


def key_of(word: str) -> tuple[int, str]:
    return ord(word[0]), "?" + word[1:]


def drive(rule: Rule, setting: Setting, num_operations: int, rng: random.Random, every: int = 8) -> SideBySide:
    """Random requests, some of them overlapping; `AssertionError` where cache and twin differ.

    Hits, victims and bytes are compared at every operation, all facts at one in `every`.
    """
    both = SideBySide(rule, setting)
    coming = requests(rng, setting)
    now_s = 0.0
    for operation in range(num_operations):
        try:
            begins = len(both.running) < setting.num_running and (not both.running or rng.randrange(20) < 11)
            if begins:
                request = next(coming)
                now_s = max(now_s, request.arrival_s)
                both.begin(request, now_s)
            if not begins or setting.num_running == 1:
                now_s += rng.randrange(1000) / 4000
                both.finish(rng.randrange(len(both.running)), now_s)
            if operation % every == 0:
                both.check()
        except AssertionError as error:
            error.add_note(f"{rule.name}, {setting.name}, operation {operation}")
            raise
    return both
