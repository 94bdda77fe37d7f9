"""`take_changed` names every node that is to be ranked anew: random operations, the facts of all nodes compared."""

import random

import pytest

from marconi.tree import Node, RadixTree, check_invariants

from .faults import keep_to_itself
from .letters import path

NUM_OPERATIONS = 1_500
NUM_LETTERS = 3
MAX_UNITS = 9
NUM_STATES = 14
"""How many states a tree may hold before one is evicted."""


def facts(tree: RadixTree) -> dict[Node, tuple[int, int, int]]:
    """What a rule reads of every evictable node: it is in the table only while it is evictable."""
    return {
        node: (node.count_freed_tokens(), node.checkpoint_depth_above, len(node.live_children))
        for node in tree.nodes()
        if node.has_state and not node.num_locks
    }


def differing(before: dict[Node, tuple[int, int, int]], after: dict[Node, tuple[int, int, int]]) -> set[Node]:
    return {node for node in before.keys() | after.keys() if before.get(node) != after.get(node)}


def operate(tree: RadixTree, rng: random.Random) -> str:
    """One random operation, by name."""
    states = [node for node in tree.nodes() if node.has_state]
    unlocked = [node for node in states if not node.num_locks]
    locked = [node for node in states if node.num_locks]
    if locked and rng.random() < 0.15:
        tree.unlock(rng.choice(locked))
        return "unlock"
    if states and rng.random() < 0.1:
        tree.lock(rng.choice(states))
        return "lock"
    if unlocked and (len(states) > NUM_STATES or rng.random() < 0.3):
        tree.evict(rng.choice(unlocked))
        return "evict"
    text = "".join(chr(97 + rng.randrange(NUM_LETTERS)) for _ in range(rng.randint(1, MAX_UNITS)))
    depths = sorted(rng.sample(range(1, len(text) + 1), min(len(text), rng.choice((1, 1, 2, 3)))))
    tree.insert(path(text), [depth * tree.unit_tokens for depth in depths], rng.randrange(2))
    return "insert"


def run(max_ghosts: int, unit_tokens: int, seed: int) -> None:
    """Random operations; `AssertionError` where a node's facts differ and `take_changed` does not say so."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    tree = RadixTree(unit_tokens, max_ghosts)
    before = facts(tree)
    for index in range(NUM_OPERATIONS):
        tree.take_changed()
        name = operate(tree, rng)
        after = facts(tree)
        unnoted = differing(before, after) - set(tree.take_changed())
        assert not unnoted, f"operation {index}, {name}: not noted: {unnoted}"
        before = after
        check_invariants(tree)


@pytest.mark.parametrize(("max_ghosts", "unit_tokens"), [(0, 1), (3, 1), (40, 16)])
def test_every_node_whose_rank_may_differ_is_noted(max_ghosts: int, unit_tokens: int) -> None:
    run(max_ghosts, unit_tokens, seed=1)


@pytest.mark.parametrize("method", ["_note_nearest_below", "_note_only_leaf", "_give_state"])
def test_a_tree_that_keeps_a_change_to_itself_is_caught(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_to_itself(monkeypatch, method)
    with pytest.raises(AssertionError, match="not noted"):
        run(max_ghosts=3, unit_tokens=1, seed=1)
