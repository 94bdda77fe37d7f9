"""Columns of a tree: those of a recursion by definition, in any slices, and sound while the tree changes meanwhile."""

import msgspec
import pytest

from marconi.policy.request import pack
from marconi.tree import RadixTree, check_invariants
from marconi.view.snapshot import UNKNOWN, Columns, NodeKind, PrefixHashes, Walk, prefix_hash, snapshot
from tree.letters import at, insert, path

from .trees import RandomTree, columns_by_definition


def walked(walk: Walk, max_nodes: int) -> Columns:
    while not walk.advance(max_nodes):
        pass
    return walk.columns()


@pytest.mark.parametrize("seed", range(5))
def test_the_columns_are_those_of_the_definition_after_every_change(seed: int) -> None:
    world = RandomTree(seed)
    hashes = PrefixHashes(world.tree)
    for step in range(150):
        world.change()
        expected = columns_by_definition(world.tree)
        # What one walk knows of hashes serves the next: splits, merges and revivals change no prefix.
        assert snapshot(world.tree, hashes) == expected
        assert walked(Walk(world.tree), step % 7 + 1) == expected
    check_invariants(world.tree)
    assert set(expected.kind) >= {NodeKind.LIVE, NodeKind.LIVE | NodeKind.STATE, NodeKind.GHOST}


def test_a_hash_that_is_kept_too_long_would_be_found() -> None:
    """The control: the comparison notices one wrong entry of one column."""
    world = RandomTree(0)
    for _ in range(50):
        world.change()
    hashes = PrefixHashes(world.tree)
    snapshot(world.tree, hashes)
    serial = next(iter(world.tree.nodes())).serial
    hashes.known[serial] ^= 1
    assert snapshot(world.tree, hashes) != columns_by_definition(world.tree)


@pytest.mark.parametrize("seed", range(5))
def test_a_walk_that_may_hash_little_knows_the_rest_after_a_few_more(seed: int) -> None:
    world = RandomTree(seed)
    hashes, num_unknown = PrefixHashes(world.tree), list[int]()
    for _ in range(60):
        world.change()
    while not num_unknown or num_unknown[-1]:
        if len(num_unknown) < 4:
            world.change()
        expected, found = columns_by_definition(world.tree), snapshot(world.tree, hashes, 8)
        assert msgspec.structs.replace(found, hash=expected.hash) == expected
        assert all(each in (UNKNOWN, right) for each, right in zip(found.hash, expected.hash, strict=True))
        num_unknown.append(found.hash.count(UNKNOWN))
    assert num_unknown[0] > 0
    assert len(num_unknown) < 60, "each walk hashes at least a node"


@pytest.mark.parametrize("seed", range(20))
def test_a_walk_through_a_tree_that_changes_is_a_sound_tree(seed: int) -> None:
    """Parents come before children, spans add up, no prefix comes twice, and what never changed is there."""
    world = RandomTree(seed, max_ghosts=6)
    for _ in range(60):
        world.change()
    before = columns_by_definition(world.tree)
    walk = Walk(world.tree)
    steady = set(zip(before.hash, before.depth, strict=True))
    while not walk.advance(3):
        world.change()
        now = columns_by_definition(world.tree)
        steady &= set(zip(now.hash, now.depth, strict=True))
    found = walk.columns()
    assert all(parent < index for index, parent in enumerate(found.parent))
    assert all(tokens > 0 for tokens, parent in zip(found.tokens, found.parent, strict=True) if parent >= 0)
    for index, parent in enumerate(found.parent):
        assert found.depth[index] == found.tokens[index] + (found.depth[parent] if parent >= 0 else 0)
    seen = [*zip(found.hash, found.depth, strict=True)]
    assert len({*seen}) == len(seen)
    assert steady <= {*seen}


def test_a_node_that_was_removed_meanwhile_is_skipped() -> None:
    tree = RadixTree()
    insert(tree, "ab")
    insert(tree, "cd")
    walk = Walk(tree)
    walk.advance(1)
    tree.evict(at(tree, "cd"))
    assert walked(walk, 1).hash == [0, prefix_hash(path("ab"))]


def test_a_merged_node_and_a_split_node_are_found_as_they_have_become() -> None:
    tree = RadixTree()
    insert(tree, "abcd", 2, 4)
    insert(tree, "xyz")
    walk = Walk(tree)
    walk.advance(1)
    tree.evict(at(tree, "ab"))  # merged into the node below
    insert(tree, "xyq")  # splits the other
    columns = walked(walk, 10)
    prefixes = ["", "abcd", "xy", "xyz", "xyq"]
    assert columns.hash == [prefix_hash(path(prefix)) for prefix in prefixes]
    assert columns.parent == [-1, 0, 0, 2, 2]
    assert columns.tokens == [0, 4, 2, 1, 1]


def test_equal_prefixes_of_two_namespaces_have_two_hashes() -> None:
    tree = RadixTree()
    insert(tree, "ab")
    insert(tree, "ab", namespace=5)
    hashes = snapshot(tree).hash
    assert hashes == [prefix_hash(b""), prefix_hash(path("ab")), prefix_hash(b"", 5), prefix_hash(path("ab"), 5)]
    assert len({*hashes}) == 4


def test_the_columns_hold_no_token() -> None:
    tree = RadixTree()
    token = 987_654_321
    tree.insert(pack([token, 1, token]), [3])
    assert str(token) not in msgspec.json.encode(snapshot(tree)).decode()


def test_an_empty_tree_has_empty_columns() -> None:
    columns = snapshot(RadixTree())
    assert all(column == [] for column in msgspec.structs.asdict(columns).values())
