"""Wishes of a name space: what it retains and demotes, at its own cost alone."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from marconi.model.learned_latency import LearnedLatency
from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.catalog import SERVED, PolicyInputs
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease, Request, pack
from marconi.policy.retention import (
    MAX_DEMOTED,
    MAX_LOOKED_AT,
    MAX_PASSED,
    MAX_RETAIN_S,
    MAX_RETAINED,
    Retention,
    may_pay,
)
from marconi.tree import Node, RadixTree
from marconi_lab.eviction.joint_lru import JointLru

OURS, THEIRS = 1, 2
NEEDS = frozenset({Need.KV, Need.STATE})
COSTS = Costs(kv_bytes_per_token=1, state_bytes=10, flops=float)


class Served(HybridCache):
    """A tree whose states are left and evicted one at a time."""

    def __init__(self, rule: Eviction | None = None) -> None:
        super().__init__(RadixTree(), Judicious(), Order(rule or SeparateLru(NEEDS)))
        self.now_s = 0.0

    def leave(self, namespace: int, ids: Iterable[int]) -> Node:
        """A state after `ids`, a second later than the one before."""
        self.now_s += 1.0
        path = [*ids]
        request = Request(pack(path), len(path), 0, len(path), self.now_s, namespace=namespace)
        return self.insert(Lease(request, self.match(request)), [len(path)], self.now_s)[-1]

    def victims(self, num: int, need: Need = Need.STATE) -> list[Node]:
        """The next `num` states that are evicted."""
        found: list[Node] = []
        while len(found) < num:
            held = [node for node in self.tree.nodes() if node.has_state]
            assert self.evict(need, self.now_s) is not None
            self.check_invariants()
            found += [node for node in held if not node.has_state]
        return found


def test_a_retained_state_trades_places_with_the_next_of_its_name_space() -> None:
    served = Served()
    first, theirs, second, others, third = (
        served.leave(namespace, [index]) for index, namespace in enumerate((OURS, THEIRS, OURS, THEIRS, OURS))
    )
    served.retain(first, 100.0, served.now_s)
    assert served.victims(3) == [second, theirs, third], "without the wish: first, theirs, second"
    assert served.victims(2) == [others, first], "nothing of its name space is left to pay"


def test_room_of_its_own_is_made_by_states_of_the_name_space_alone() -> None:
    """In the order in which they would be evicted, but for those that are retained, locked or awaited."""
    served = Served()
    retained, theirs, first, locked, second, awaited = (
        served.leave(namespace, [index]) for index, namespace in enumerate((OURS, THEIRS, OURS, OURS, OURS, OURS))
    )
    served.retain(retained, 100.0, served.now_s)
    served.lock(locked)
    served.queue([], [("waiting", awaited)])
    root, evicted = served.tree.root(OURS), []
    while served.evict_own(root, Need.STATE, served.now_s) is not None:
        served.check_invariants()
        evicted.append([node for node in (first, second) if not node.has_state])
    assert evicted == [[first], [first, second]]
    assert all(node.has_state for node in (retained, theirs, locked, awaited))


def test_room_is_looked_for_among_a_bounded_number_of_victims() -> None:
    served = Served()
    theirs = [served.leave(THEIRS, [index]) for index in range(MAX_PASSED)]
    own = served.leave(OURS, [1])
    assert served.evict_own(served.tree.root(OURS), Need.STATE, served.now_s) is None
    assert served.evict_own(served.tree.root(THEIRS), Need.STATE, served.now_s) is not None
    assert served.evict_own(served.tree.root(OURS), Need.STATE, served.now_s) is not None
    assert (theirs[0].has_state, own.has_state) == (False, False)


def test_without_other_name_spaces_a_retained_state_is_evicted_last_and_then_all_the_same() -> None:
    served = Served()
    nodes = [served.leave(OURS, [index]) for index in range(5)]
    served.retain(nodes[0], 100.0, served.now_s)
    served.retain(nodes[2], 100.0, served.now_s)
    assert served.victims(5) == [nodes[index] for index in (1, 3, 4, 0, 2)]
    assert not served.retention


def test_a_retention_ends() -> None:
    served = Served()
    nodes = [served.leave(OURS, [index]) for index in range(4)]
    served.retain(nodes[0], 10.0, served.now_s)
    assert served.victims(1) == [nodes[1]]
    served.now_s = 10.0
    assert served.victims(3) == [nodes[0], nodes[2], nodes[3]]


def test_a_long_state_is_paid_for_with_as_many_tokens() -> None:
    served = Served()
    long = served.leave(OURS, range(100, 130))
    theirs = served.leave(THEIRS, range(10))
    short = [served.leave(OURS, [200 + index, *range(9)]) for index in range(5)]
    served.retain(long, 100.0, served.now_s)
    assert served.victims(4, Need.KV) == [*short[:3], theirs]


def test_what_is_demoted_is_evicted_before_others_of_its_name_space_and_of_no_other() -> None:
    served = Served()
    theirs, first, second, third = (served.leave(name, [i]) for i, name in enumerate((THEIRS, OURS, OURS, OURS)))
    served.demote(third)
    assert served.victims(3) == [theirs, third, first]
    assert served.victims(1) == [second]


def test_a_request_that_resumes_from_a_demoted_state_undoes_it() -> None:
    served = Served()
    nodes = [served.leave(OURS, [index, 7]) for index in range(3)]
    served.demote(nodes[2])
    request = Request(pack([2, 7, 8]), 3, 0, 3, 5.0, namespace=OURS)
    served.begin(Lease(request, served.match(request)), 5.0)
    assert served.victims(3) == nodes
    assert not served.retention


def test_a_request_that_leaves_a_demoted_state_again_undoes_it() -> None:
    """No request resumes from the end of its own prompt: one that repeats it computes it once more."""
    served = Served()
    nodes = [served.leave(OURS, [index]) for index in range(3)]
    served.demote(nodes[1])
    assert served.leave(OURS, [1]) is nodes[1]
    assert served.victims(3) == [nodes[0], nodes[2], nodes[1]]


@pytest.mark.parametrize("is_retained", [True, False])
def test_what_a_wish_has_evicted_was_not_evicted_to_keep_one_of_more_worth(is_retained: bool) -> None:
    served = Served()
    nodes = [served.leave(OURS, [index]) for index in range(5)]
    if is_retained:
        served.retain(nodes[0], 100.0, served.now_s)
        served.retain(nodes[1], 100.0, served.now_s)
    else:
        served.demote(nodes[2])
    assert served.victims(1) == [nodes[2]]
    assert nodes[2].absences is not None
    assert nodes[2].absences[-1].kept is None


def test_the_last_of_two_wishes_counts() -> None:
    served = Served()
    nodes = [served.leave(OURS, [index]) for index in range(4)]
    served.retain(nodes[0], 100.0, served.now_s)
    served.demote(nodes[0])
    served.demote(nodes[3])
    served.retain(nodes[3], 100.0, served.now_s)
    assert served.victims(4) == nodes


def test_a_state_that_was_paid_for_is_evicted_next_once_it_is_demoted() -> None:
    served = Served()
    nodes = [served.leave(name, [i]) for i, name in enumerate((OURS, THEIRS, THEIRS, OURS, OURS))]
    served.retain(nodes[0], 100.0, served.now_s)
    assert served.victims(1) == [nodes[3]]
    served.demote(nodes[0])
    assert served.victims(3) == nodes[:3]


def test_wishes_are_bounded() -> None:
    served = Served()
    nodes = [served.leave(OURS, [index]) for index in range(MAX_RETAINED + 2)]
    assert [served.retain(node, 9e9, served.now_s) for node in nodes] == [True] * MAX_RETAINED + [False] * 2
    assert served.retention is not None
    assert served.retention.is_retained(nodes[0], served.now_s + MAX_RETAIN_S - 1.0)
    assert not served.retention.is_retained(nodes[0], served.now_s + MAX_RETAIN_S)
    assert served.retain(served.leave(THEIRS, [1]), 9e9, served.now_s), "each name space has bounds of its own"
    assert served.retain(nodes[-1], 9e9, served.now_s + MAX_RETAIN_S), "what has ended makes room"
    assert [served.demote(node) for node in nodes[: MAX_DEMOTED + 1]] == [True] * MAX_DEMOTED + [False]


def test_the_one_that_pays_is_found_far_behind_others() -> None:
    served = Served()
    first = served.leave(OURS, [0])
    theirs = [served.leave(THEIRS, [index]) for index in range(2 * MAX_PASSED)]
    second, third = served.leave(OURS, [1]), served.leave(OURS, [2])
    served.retain(first, 9e9, served.now_s)
    assert served.victims(1) == [second]
    assert served.victims(MAX_PASSED) == theirs[:MAX_PASSED]
    assert served.victims(1) == [third], "its turn has come again"


def test_where_none_pays_among_the_next_a_bounded_number_of_the_name_space_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first that were made; of these the one that was used longest ago."""
    served = Served()
    first = served.leave(OURS, [0])
    theirs = [served.leave(THEIRS, [index]) for index in range(MAX_PASSED)]
    ours = [served.leave(OURS, [index]) for index in range(1, 2 * MAX_LOOKED_AT)]
    served.retain(first, 9e9, served.now_s)
    looked_at: list[Node] = []

    def recorded(node: Node, need: Need) -> bool:
        looked_at.append(node)
        return may_pay(node, need)

    monkeypatch.setattr("marconi.policy.hybrid_cache.may_pay", recorded)
    assert served.evict(Need.STATE, served.now_s) is not None
    assert looked_at == [first, *ours[: MAX_LOOKED_AT - 1]]
    assert [node for node in (first, *theirs, *ours) if not node.has_state] == ours[:1]


def test_what_waiting_requests_would_start_from_pays_for_nothing() -> None:
    served = Served()
    nodes = [served.leave(OURS, [index]) for index in range(3)]
    served.retain(nodes[0], 100.0, served.now_s)
    served.queue((), [("a request", nodes[1])])
    assert served.victims(3) == [nodes[2], nodes[0], nodes[1]]


@dataclass
class Twin:
    """The rule by its definition: victims are found by looking at every state, and a trade by counting states."""

    served: Served
    until_s: dict[Node, float] = field(default_factory=dict)
    demoted: list[Node] = field(default_factory=list)
    turns: dict[Node, int] = field(default_factory=dict)
    paid: dict[Node, list[tuple[int, int]]] = field(default_factory=dict)
    num_evictions: int = 0

    def namespace(self, node: Node) -> int:
        while node.parent is not None:
            node = node.parent
        return next(number for number, root in self.served.tree.roots.items() if root is node)

    def order(self, need: Need) -> list[Node]:
        held = [node for node in self.served.tree.nodes() if node.has_state and not node.num_locks]
        held = [node for node in held if need is Need.STATE or not node.live_children]
        return sorted(held, key=lambda node: (node.last_pass_s if need is Need.KV else node.last_hit_s, node.serial))

    def is_retained(self, node: Node) -> bool:
        return self.until_s.get(node, 0.0) > self.served.now_s

    def victim(self, need: Need) -> Node | None:
        self.turns = {node: turn for node, turn in self.turns.items() if turn > self.num_evictions}
        everything = self.order(need)
        order = [node for node in everything if node not in self.turns]
        if not order:
            return min(everything, key=lambda node: (node.last_hit_s, node.serial), default=None)
        due = order[0]
        ours = [node for node in order if self.namespace(node) == self.namespace(due)]
        for node in self.demoted:
            if node in ours:
                return node
        payers = [node for node in ours if not self.is_retained(node)]
        if not self.is_retained(due) or not payers:
            self.num_evictions += 1
            return due
        num_passed = order.index(payers[0]) - 1
        paid = self.paid.setdefault(due, [])
        paid.append((payers[0].freed_tokens, num_passed))
        if sum(num_tokens for num_tokens, _ in paid) >= due.freed_tokens:
            self.num_evictions += 1
            self.turns[due] = self.num_evictions + paid[0][1]
            del self.paid[due]
        return payers[0]

    def retain(self, node: Node, until_s: float) -> None:
        self.until_s[node] = until_s
        self.demoted = [each for each in self.demoted if each is not node]

    def demote(self, node: Node) -> None:
        self.forget(node)
        self.demoted.append(node)

    def left(self, node: Node) -> None:
        self.demoted = [each for each in self.demoted if each is not node]

    def forget(self, node: Node) -> None:
        self.until_s.pop(node, None)
        self.paid.pop(node, None)
        self.turns.pop(node, None)
        self.demoted = [each for each in self.demoted if each is not node]


def random_run(seed: int, num_steps: int = 600) -> None:
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    served = Served()
    twin = Twin(served)
    for _ in range(num_steps):
        kind = rng.random()
        held = [node for node in served.tree.nodes() if node.has_state]
        if kind < 0.45 or len(held) < 3:
            twin.left(served.leave(rng.randrange(3), [rng.randrange(3) for _ in range(rng.randint(1, 7))]))
        elif kind < 0.6:
            node, until_s = rng.choice(held), served.now_s + rng.choice([5.0, 20.0, 200.0])
            assert served.retain(node, until_s, served.now_s)
            twin.retain(node, until_s)
        elif kind < 0.65:
            node = rng.choice(held)
            # The twin knows of no bound.
            if node in twin.demoted or len(twin.demoted) < MAX_DEMOTED:
                twin.demote(node)
                assert served.demote(node)
        else:
            need = rng.choice([Need.KV, Need.STATE])
            expected = twin.victim(need)
            served.evict(need, served.now_s)
            gone = [node for node in held if not node.has_state]
            assert gone == [expected]
            twin.forget(gone[0])
        served.check_invariants()


@pytest.mark.parametrize("seed", range(4))
def test_victims_are_those_of_the_twin(seed: int) -> None:
    random_run(seed)


def test_a_payment_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    paid = Retention.paid
    monkeypatch.setattr(Retention, "paid", lambda self, node, *_: paid(self, node, 1000, 0))
    with pytest.raises(AssertionError):
        random_run(0)


def shares(rule: Eviction, need: Need, seed: int, *, wishes: bool) -> list[frozenset[int]]:
    """What the others hold after each step of a run in which all of `OURS` is retained as it is left."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    served, held, number = Served(rule), list[frozenset[int]](), 0
    for step in range(400):
        is_ours = rng.random() < 0.5
        # Theirs are all left again at times.
        again = not is_ours and rng.random() < 0.3
        first = rng.randrange(step + 1) if again else step
        ids = [first, *range(first % 9)]
        node = served.leave(OURS if is_ours else THEIRS, ids)
        if wishes and is_ours:
            served.retain(node, served.now_s + rng.choice([5.0, 200.0]), served.now_s)
        elif is_ours:
            rng.choice([5.0, 200.0])
        while served.tree.num_states > 30 or served.tree.num_tokens > 120:
            served.evict(need if served.tree.num_states > 30 else Need.KV, served.now_s)
            number += 1
        root = served.tree.root(THEIRS)
        held.append(frozenset(child.key[0] + 256 * child.key[1] for child in root.live_children))
    assert number > 100
    return held


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("need", [Need.KV, Need.STATE])
def test_with_a_recency_rule_others_never_hold_less_for_anothers_wishes(need: Need, seed: int) -> None:
    without, beside = (shares(JointLru(NEEDS), need, seed, wishes=wishes) for wishes in (False, True))
    assert all(less <= more for less, more in zip(without, beside, strict=True))


def test_every_rule_of_a_server_takes_wishes() -> None:
    """A state that is retained outlives all others of its name space, whatever ranks them."""
    latency = LearnedLatency(float)
    for num in range(1, 20):
        latency.observe(0, num, num)
    for policy in SERVED.values():
        inputs = PolicyInputs(costs=COSTS, needs=NEEDS, number=1.0, latency=latency, ttft_budget_s=1.0)
        served = Served(policy.rules(inputs).eviction)
        nodes = [served.leave(OURS, [index]) for index in range(6)]
        served.retain(nodes[2], 100.0, served.now_s)
        assert served.victims(6)[-1] is nodes[2]
