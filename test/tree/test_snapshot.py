"""A restored tree is the tree."""

import pickle

import numpy as np
import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.eviction.base import Costs
from marconi.policy.eviction.lru import JointLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.request import Request, pack
from marconi.tree import Node, RadixTree, check_invariants
from marconi.tree.snapshot import TreeSnapshot, take_snapshot
from rig.budget_cache import BudgetCache, JointBudget

COSTS = Costs(kv_bytes_per_token=3, state_bytes=50, flops=lambda num_tokens: float(num_tokens**2))


def requests(seed: int, count: int) -> list[Request]:
    """Conversations in three namespaces that branch off a few system prompts and go on at random."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(4, size=int(rng.integers(5, 40))).tolist() for _ in range(4)]
    histories: list[tuple[int, list[int]]] = []
    made = []
    for index in range(count):
        if histories and rng.random() < 0.6:
            namespace, history = histories[int(rng.integers(len(histories)))]
        else:
            namespace, history = int(rng.integers(3)), systems[int(rng.integers(4))]
        prompt = [*history, *rng.integers(4, size=int(rng.integers(1, 20))).tolist()]
        path = [*prompt, *rng.integers(4, size=int(rng.integers(1, 20))).tolist()]
        histories.append((namespace, path))
        made.append(
            Request(pack(path), len(prompt), len(path) - len(prompt), len(path), index * 0.5, namespace=namespace)
        )
    return made


def cache(tree: RadixTree, alpha: float = 2.0) -> BudgetCache:
    return BudgetCache(tree, Judicious(), UtilityEviction(COSTS, alpha), COSTS, JointBudget(3000))


def facts(node: Node) -> tuple[object, ...]:
    return (
        node.key,
        node.depth,
        node.serial,
        node.is_live,
        node.has_state,
        node.num_locks,
        node.num_hits,
        node.last_hit_s,
        node.last_pass_s,
        node.num_live_children,
        node.parent.serial if node.parent else None,
        [child.serial for child in node.children.values()],
    )


def all_facts(tree: RadixTree) -> list[object]:
    nodes = [facts(node) for root in tree.roots.values() for node in root.walk()]
    totals = (tree.unit_tokens, tree.max_ghosts, tree.num_tokens, tree.num_states, tree.num_nodes)
    return [list(tree.roots), totals, [ghost.serial for ghost in tree.ghosts], nodes]


def sent(snapshot: TreeSnapshot) -> TreeSnapshot:
    """The snapshot as another process gets it."""
    received: TreeSnapshot = pickle.loads(pickle.dumps(snapshot))  # noqa: S301 - our own bytes
    return received


@pytest.mark.parametrize("seed", range(5))
def test_a_restored_tree_has_every_fact_of_the_original(seed: int) -> None:
    original = cache(RadixTree(max_ghosts=30))
    for request in requests(seed, 300):
        original.serve(request)
    assert original.tree.ghosts
    restored = sent(take_snapshot(original.tree)).restore()
    check_invariants(restored)
    assert all_facts(restored) == all_facts(original.tree)


@pytest.mark.parametrize("seed", range(5))
def test_a_restored_tree_goes_on_as_the_original_does(seed: int) -> None:
    stream = requests(seed, 600)
    original = cache(RadixTree(max_ghosts=30))
    for request in stream[:300]:
        original.serve(request)
    copy = cache(sent(take_snapshot(original.tree)).restore())
    copy.tell()
    num_evictions = original.counters.num_evictions.copy()
    for request in stream[300:]:
        assert copy.serve(request) == original.serve(request)
    assert original.counters.num_evictions != num_evictions
    check_invariants(copy.tree)
    assert all_facts(copy.tree) == all_facts(original.tree)


def test_locks_are_kept_or_given_back_on_demand() -> None:
    original = cache(RadixTree())
    stream = requests(1, 40)
    for request in stream:
        original.serve(request)
    leases = [original.begin(request, 100.0) for request in stream]
    held = [lease.match.checkpoint for lease in leases if lease.match.checkpoint.parent is not None]
    assert held
    snapshot = take_snapshot(original.tree)
    locked = sorted(node.serial for node in snapshot.restore().nodes() if node.is_locked)
    assert locked == sorted({node.serial for node in held})
    free = snapshot.without_locks().restore()
    check_invariants(free)
    assert not any(node.is_locked for node in free.nodes())


def test_a_snapshot_stays_what_it_was_while_the_tree_goes_on() -> None:
    original = cache(RadixTree(max_ghosts=5))
    stream = requests(2, 200)
    for request in stream[:100]:
        original.serve(request)
    snapshot = take_snapshot(original.tree)
    before = all_facts(original.tree)
    for request in stream[100:]:
        original.serve(request)
    assert all_facts(snapshot.restore()) == before != all_facts(original.tree)


def test_a_path_deeper_than_recursion_allows_is_carried() -> None:
    tree = RadixTree()
    tree.insert(pack(range(5000)), range(1, 5001))
    restored = sent(take_snapshot(tree)).restore()
    check_invariants(restored)
    assert restored.num_states == 5000


def test_blocks_and_empty_trees_are_carried() -> None:
    tree = RadixTree(unit_tokens=512, max_ghosts=3)
    assert take_snapshot(tree).num_nodes == 0
    assert all_facts(take_snapshot(tree).restore()) == all_facts(tree)
    tree.insert(pack([1, 2, 3]), [512, 1536], namespace=7)
    restored = take_snapshot(tree).restore()
    check_invariants(restored)
    assert restored.match(pack([1, 2, 3, 4]), 2047, 7).checkpoint.depth == 1536


def test_whoever_ranks_nodes_hears_of_every_state() -> None:
    tree = RadixTree()
    tree.insert(pack(range(10)), [4, 10])
    tree.insert(pack([*range(6), 99]), [7])
    restored = take_snapshot(tree).restore()
    assert sorted(node.depth for node in restored.changed) == [4, 7, 10]
    lru = BudgetCache(restored, Judicious(), JointLru(), COSTS, JointBudget(1000))
    lru.tell()
    assert not restored.changed
