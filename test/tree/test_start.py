"""What is matched or inserted from a node on is what is matched or inserted from the root on."""

import random

import pytest

from marconi.policy.request import pack
from marconi.tree import Match, Node, RadixTree, check_invariants


def outline(tree: RadixTree) -> list[tuple[int, int, bool, bool, bytes]]:
    return sorted(
        (node.serial, node.depth, node.is_live, node.has_state, node.key)
        for root in tree.roots.values()
        for node in root.walk()
    )


def plain(match: Match) -> tuple[int, int, int, bool, int, int]:
    ghost = 0 if match.ghost is None else match.ghost.serial
    return (match.checkpoint.serial, *match[1:5], ghost)


def states_on(tree: RadixTree, path: bytes) -> list[Node]:
    """Nodes with a state that `path` runs through."""
    num_units = len(path) // tree.unit_bytes
    found = {tree.match(path, depth * tree.unit_tokens).checkpoint for depth in range(num_units + 1)}
    return sorted((node for node in found if node.parent is not None), key=lambda node: node.depth)


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_an_insert_from_a_node_makes_the_tree_that_one_from_the_root_makes(seed: int, unit: int) -> None:
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    whole, parts = RadixTree(unit, max_ghosts=30, ids_per_unit=unit), RadixTree(unit, max_ghosts=30, ids_per_unit=unit)
    num_started = 0
    for _ in range(120):
        units = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
        path = pack(letter for letter in units for _ in range(unit))
        held = states_on(parts, path)
        start = rng.choice(held) if held else None
        before = start.depth if start else 0
        rest = path[before // unit * parts.unit_bytes :]
        limit = rng.randint(before, len(units) * unit)
        assert plain(whole.match(path, limit)) == plain(parts.match(rest, limit, start=start)) or (
            start is not None and limit < start.depth
        )
        room = range(before // unit + 1, len(units) + 1)
        if room:
            depths = sorted(depth * unit for depth in rng.sample(room, min(len(room), rng.randint(1, 3))))
            whole.insert(path, depths)
            parts.insert(rest, depths, start=start)
            num_started += start is not None
        if rng.random() < 0.6:
            nodes = sorted((node for node in whole.nodes() if node.has_state), key=lambda node: node.serial)
            victim = rng.choice(nodes)
            twin = next(node for node in parts.nodes() if node.serial == victim.serial)
            assert whole.evict(victim) == parts.evict(twin)
        assert outline(whole) == outline(parts)
        check_invariants(parts)
    assert num_started > 30


def test_a_checkpoint_at_the_start_or_before_it_is_refused() -> None:
    tree = RadixTree()
    (start,) = tree.insert(pack(range(10)), [10])
    for depth in (5, 10):
        with pytest.raises(ValueError, match=f"got one at {depth} tokens"):
            tree.insert(pack(range(10, 20)), [depth], start=start)
    with pytest.raises(ValueError, match="got one at 21 tokens"):
        tree.insert(pack(range(10, 20)), [21], start=start)
