"""States that outlive a server: the order in which they are saved, and their adoption by an empty cache."""

import math

import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Need
from marconi.policy.catalog import PolicyInputs, served
from marconi.policy.eviction.order import Order
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.persistence import FIRST_BYTES_PER_S, SaveBudget, SavedPaths, SavedState, most_valuable_first
from marconi.policy.request import Request
from marconi.tree import Node, RadixTree
from rig.budget_cache import BudgetCache, SplitBudget

from .random_runs import HYBRID_COSTS, SPLIT, random_requests, serve_overlapping

BUDGET = SplitBudget(kv_bytes=400, state_bytes=1600)
END_S = 500.0


def inputs(eviction: str) -> PolicyInputs:
    return PolicyInputs(costs=HYBRID_COSTS, needs=SPLIT, number=2.0 if eviction == "marconi" else math.nan)


def filled(seed: int, eviction: str = "best") -> BudgetCache:
    """A cache after random requests, some of which ran at the same time."""
    rule = served(eviction).rules(inputs(eviction)).eviction
    cache = BudgetCache(RadixTree(max_ghosts=30), Judicious(least_tokens=1), rule, HYBRID_COSTS, BUDGET)
    serve_overlapping(cache, random_requests(seed), seed, num_running=3)
    return cache


def empty(eviction: str = "best") -> HybridCache:
    rule = served(eviction).rules(inputs(eviction)).eviction
    return HybridCache(RadixTree(), Judicious(least_tokens=1), Order(rule))


def held(cache: HybridCache) -> dict[tuple[int, bytes], tuple[float, int, object]]:
    """Every state by its path, with the facts that rank it.

    The last pass is left out: a node without a state may know of a later one than the states below it.
    """
    found = {}
    for namespace, root in cache.tree.roots.items():
        for node in root.walk():
            if node.has_state:
                found[namespace, path_of(node)] = node.last_hit_s, node.num_hits, node.left_by
    return found


def path_of(node: Node) -> bytes:
    return (b"" if node.parent is None else path_of(node.parent)) + node.key


def saved(cache: HybridCache) -> list[SavedState]:
    """What is saved of `cache`, the most valuable first."""
    paths = SavedPaths(cache.tree)
    return [paths.add(ranked) for ranked in most_valuable_first(cache, END_S)]


def adopt(cache: HybridCache, states: list[SavedState], now_s: float) -> int:
    """Adopt `states` in order; returns the tokens of KV that were loaded with them."""
    num_tokens = 0
    for state in states:
        known = cache.tree.match(state.path, state.depth, state.namespace).num_live_tokens
        assert known == state.start, "KV before a state comes with states that precede it, and no KV comes twice"
        cache.adopt(state.path, state.namespace, state.depth, state.facts, now_s)
        num_tokens += state.depth - state.start
        cache.check_invariants()
        assert cache.tree.num_tokens == num_tokens
    return num_tokens


@pytest.mark.parametrize("eviction", ["best", "lru", "marconi"])
@pytest.mark.parametrize("seed", range(4))
def test_an_adopted_cache_is_the_one_that_was_saved(seed: int, eviction: str) -> None:
    cache = filled(seed, eviction)
    before, num_tokens = held(cache), cache.tree.num_tokens
    assert len(before) > 20
    states = saved(cache)
    cache.check_invariants()
    assert (held(cache), cache.tree.num_tokens) == (before, num_tokens), "saving changes nothing"
    new = empty(eviction)
    assert adopt(new, states, END_S) == num_tokens
    assert held(new) == before


@pytest.mark.parametrize("seed", range(4))
def test_any_first_part_can_be_adopted(seed: int) -> None:
    states = saved(filled(seed))
    for num in range(0, len(states), 7):
        adopt(empty(), states[:num], END_S)


def test_the_order_matters() -> None:
    """The control: the least valuable first, KV is missing before some."""
    states = saved(filled(1))
    with pytest.raises(AssertionError, match="KV before a state"):
        adopt(empty(), states[::-1], END_S)


@pytest.mark.parametrize("eviction", ["best", "lru", "marconi"])
def test_what_is_evicted_first_is_saved_last_and_is_evicted_first_after_the_restart(eviction: str) -> None:
    cache = filled(2, eviction)
    victim = cache.order.victim(Need.STATE, END_S)
    assert isinstance(victim, Node)
    path = path_of(victim)
    states = saved(cache)
    assert states[-1].path == path
    if eviction == "lru":
        new = empty(eviction)
        adopt(new, states, 3.0)
        again = new.order.victim(Need.STATE, 3.0)
        assert isinstance(again, Node)
        assert path_of(again) == path, "ages are kept, though the new clock has only begun"


def test_a_state_in_use_is_saved_first() -> None:
    cache = filled(3)
    request = next(each for each in random_requests(3)[::-1] if cache.match(each).source is not None)
    source = cache.match(request).checkpoint
    assert saved(cache)[0].path != path_of(source), "the control"
    cache.lock(source)
    states = saved(cache)
    assert states[0].path == path_of(source)
    adopt(empty(), states, END_S)


def test_what_is_demoted_is_not_saved_until_a_request_uses_it() -> None:
    cache = filled(1)
    node = most_valuable_first(cache, END_S)[0].node
    path, num_held = path_of(node), len(saved(cache))
    assert cache.demote(node)
    states = saved(cache)
    assert path not in {state.path for state in states}
    assert len(states) == num_held - 1
    adopt(empty(), states, END_S)
    assert cache.retention is not None
    cache.retention.used(node)
    assert len(saved(cache)) == num_held, "the control"


def test_what_is_evicted_before_its_turn_is_left_out_and_others_bring_its_kv() -> None:
    cache = filled(1)
    ranked = most_valuable_first(cache, END_S)
    starts = {path_of(each.node): state.start for each, state in zip(ranked, saved(cache), strict=True)}
    paths, states, evicted = SavedPaths(cache.tree), [], set()
    for each in ranked:
        if each.node in evicted:
            continue
        states.append(paths.add(each))
        left = ranked[len(states) + len(evicted) :]
        victim = left[0].node if left else None
        if victim is not None:
            evicted.add(victim)
            cache.evict_node(victim, Need.STATE, END_S)
    assert len(states) > 10 < len(evicted)
    adopt(empty(), states, END_S)
    old_starts = [state._replace(start=starts[state.path]) for state in states]
    with pytest.raises(AssertionError, match="KV before a state"):
        adopt(empty(), old_starts, END_S)


def test_an_adopted_state_serves_a_request() -> None:
    cache = filled(0)
    requests = [each for each in random_requests(0) if cache.match(each).checkpoint.depth]
    hits = [cache.match(each).checkpoint.depth for each in requests]
    new = empty()
    adopt(new, saved(cache), END_S)
    assert [new.match(each).checkpoint.depth for each in requests] == hits
    assert len(hits) > 20


def test_namespaces_are_kept_apart() -> None:
    cache = filled(0)
    for namespace in (0, 1 << 100):
        path = random_requests(0)[-1].path
        request = Request(path, len(path) // 4, 0, len(path) // 4, END_S, namespace=namespace)
        cache.serve(request)
    before = held(cache)
    new = empty()
    adopt(new, saved(cache), END_S)
    assert held(new) == before
    assert {namespace for namespace, _ in before} == {0, 1 << 100}


def test_saving_ends_before_its_deadline() -> None:
    budget = SaveBudget(deadline_s=10.0)
    assert budget.has_time(int(FIRST_BYTES_PER_S), 9.0)
    assert not budget.has_time(int(FIRST_BYTES_PER_S), 9.1)
    budget.written(1000, 2.0)
    assert budget.has_time(500, 9.0), "by the measured speed: 500 bytes take a second"
    assert not budget.has_time(501, 9.0)
    assert not budget.has_time(0, 10.1)
