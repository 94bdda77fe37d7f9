"""The tiers around a rule: what is on trial or chosen ahead goes before it, what waiting requests start from last."""

import random

import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Need, NodeView
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease, Request, pack
from marconi.tree import Node, RadixTree
from marconi_lab.eviction.joint_lru import JointLru


def hybrid_cache() -> HybridCache:
    return HybridCache(RadixTree(), Judicious(), Order(JointLru(frozenset({Need.KV, Need.STATE}))))


def lease_of(hybrid: HybridCache, ids: list[int], now_s: float) -> Lease:
    request = Request(pack(ids), len(ids), 0, len(ids), now_s)
    return Lease(request, hybrid.tree.match(request.path, len(ids) - 1))


def leave(hybrid: HybridCache, ids: list[int], depths: list[int], now_s: float) -> Node:
    """The last node of what a request with `ids` leaves."""
    return hybrid.insert(lease_of(hybrid, ids, now_s), depths, now_s)[-1]


def order(hybrid: HybridCache, need: Need) -> list[int]:
    """Serials in the order in which they go, until nothing may."""
    serials = []
    while (victim := hybrid.order.victim(need, 100.0)) is not None:
        serials.append(victim.serial)
        hybrid.evict_node(victim, need, 100.0)
        hybrid.check_invariants()
    return serials


@pytest.mark.parametrize("need", [Need.KV, Need.STATE])
def test_what_is_awaited_goes_last_and_of_that_what_is_used_last_goes_first(need: Need) -> None:
    hybrid = hybrid_cache()
    nodes = [leave(hybrid, [index, 50, 51], [3], float(index)) for index in range(5)]
    hybrid.queue((), enumerate(nodes[index] for index in (3, 0, 1)))
    assert hybrid.num_awaited == 3
    assert order(hybrid, need) == [nodes[index].serial for index in (2, 4, 1, 0, 3)]


def test_a_state_is_awaited_as_long_as_one_request_waits_for_it() -> None:
    hybrid = hybrid_cache()
    old, new = (leave(hybrid, [index, 50, 51], [3], float(index)) for index in range(2))
    hybrid.queue((), [("first", old), ("second", old)])
    hybrid.queue(["first"], ())
    assert hybrid.order.victim(Need.KV, 9.0) is new
    hybrid.queue(["second"], ())
    assert hybrid.order.victim(Need.KV, 9.0) is old
    assert old.first_waiting is None


def test_a_request_keeps_its_place_when_a_deeper_state_is_found() -> None:
    hybrid = hybrid_cache()
    first, second = leave(hybrid, [1, 2, 3], [3], 0.0), leave(hybrid, [4, 5, 6], [3], 1.0)
    hybrid.queue((), [("a", hybrid.tree.root(0)), ("b", second)])
    hybrid.queue((), [("a", first)])
    assert order(hybrid, Need.KV) == [second.serial, first.serial]


class Expected:
    """What the order names, found by looking at every state."""

    def __init__(self, hybrid: HybridCache) -> None:
        self.hybrid = hybrid
        self.waiting: dict[int, Node] = {}
        """By place."""

    def victim(self, need: Need) -> Node | None:
        first_waiting = {node: place for place, node in sorted(self.waiting.items(), reverse=True)}
        held = [node for node in self.hybrid.tree.nodes() if node.has_state and not node.num_locks]
        held = [node for node in held if need is Need.STATE or not node.live_children]

        def key(node: Node) -> tuple[float, ...]:
            if node in first_waiting:
                return 4, -first_waiting[node]
            if node.leaving is not None:
                return 1, node.leaving
            if node.on_trial:
                return 0, node.last_hit_s, node.serial
            is_ranked = len(node.live_children) <= JointLru.scope.value
            return 3 - is_ranked, node.last_pass_s if is_ranked else node.last_hit_s, node.serial

        return min(held, key=key, default=None)


def random_run(seed: int, num_steps: int = 1500) -> None:
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    hybrid = hybrid_cache()
    expected, num_waited = Expected(hybrid), 0
    for step in range(num_steps):
        kind = rng.random()
        nodes = [node for node in hybrid.tree.nodes() if node.has_state]
        if kind < 0.4 or not nodes:
            ids = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
            lease, trials = lease_of(hybrid, ids, float(step)), [len(ids) // 2] if rng.random() < 0.4 else []
            if trials and trials[0]:
                hybrid.insert(lease, [*trials, len(ids)], float(step), trials=trials)
            else:
                hybrid.begin(lease, float(step))
                leave(hybrid, ids, [len(ids)], float(step))
        elif kind < 0.6:
            expected.waiting[num_waited] = rng.choice(nodes)
            hybrid.queue((), [(num_waited, expected.waiting[num_waited])])
            num_waited += 1
        elif kind < 0.7:
            hybrid.evict_next(rng.choice(nodes), step)
        elif kind < 0.85 and expected.waiting:
            place = rng.choice(list(expected.waiting))
            del expected.waiting[place]
            hybrid.queue([place], ())
        else:
            need = rng.choice([Need.KV, Need.STATE])
            assert hybrid.order.victim(need, float(step)) is expected.victim(need)
            hybrid.evict(need, float(step))
        hybrid.check_invariants()


@pytest.mark.parametrize("seed", [1, 2])
def test_victims_are_those_that_looking_at_every_state_finds(seed: int) -> None:
    random_run(seed)


def test_a_tier_that_forgets_whom_a_request_waits_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the comparison above."""
    update = Order.update

    def forgetting(order: Order, node: NodeView) -> None:
        assert isinstance(node, Node)
        waiting = node.first_waiting
        node.first_waiting = None if node.serial % 5 == 0 else waiting
        update(order, node)
        node.first_waiting = waiting

    monkeypatch.setattr(Order, "update", forgetting)
    with pytest.raises(AssertionError):
        random_run(1)


def test_a_tree_that_is_changed_behind_the_back_of_its_owner_is_seen() -> None:
    """What each verb ends in is what keeps a state in use out of the order."""
    hybrid = hybrid_cache()
    node = leave(hybrid, [1, 2, 3], [3], 0.0)
    hybrid.check_invariants()
    hybrid.tree.lock(node)
    with pytest.raises(AssertionError, match="ranked and in use, or neither"):
        hybrid.check_invariants()
    assert hybrid.order.victim(Need.STATE, 1.0) is node, "a victim in use"
    hybrid.tree.unlock(node)
    hybrid.lock(node)
    hybrid.check_invariants()
    assert hybrid.order.victim(Need.STATE, 1.0) is None
