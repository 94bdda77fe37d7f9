"""Ghosts: what was evicted is remembered, boundedly, the oldest forgotten first."""

import pytest

from marconi.tree import RadixTree, check_invariants

from .letters import at, insert, outline, text_of


def ghosts(tree: RadixTree) -> list[str]:
    return [text_of(ghost) for ghost in tree.ghosts]


def test_a_tree_without_room_for_ghosts_forgets_at_once() -> None:
    tree = RadixTree()
    tree.evict(insert(tree, "abcd")[0])
    assert outline(tree) == {}
    assert not tree.root().children


def test_the_oldest_ghost_is_forgotten_first() -> None:
    tree = RadixTree(max_ghosts=2)
    for text in ("a", "b", "c"):
        tree.evict(insert(tree, text)[0])
    assert ghosts(tree) == ["b", "c"]
    assert outline(tree) == {"b": "ghost", "c": "ghost"}
    check_invariants(tree)


def test_a_ghost_that_came_back_to_life_is_young_when_it_dies_again() -> None:
    tree = RadixTree(max_ghosts=2)
    for text in ("a", "b", "a", "c"):
        tree.evict(insert(tree, text)[0])
    assert ghosts(tree) == ["a", "c"]


def test_a_path_that_dies_at_once_is_forgotten_from_its_end() -> None:
    tree = RadixTree(max_ghosts=4)
    insert(tree, "abcd", 2, 4)
    insert(tree, "abxy")
    for text in ("abxy", "ab", "abcd"):
        tree.evict(at(tree, text))
    assert ghosts(tree) == ["abxy", "abcd", "ab"]
    tree.evict(insert(tree, "p")[0])
    tree.evict(insert(tree, "q")[0])
    assert ghosts(tree) == ["abcd", "ab", "p", "q"]
    check_invariants(tree)


def test_a_branch_is_merged_once_the_last_ghost_below_it_is_forgotten() -> None:
    tree = RadixTree(max_ghosts=1)
    insert(tree, "abcd")
    tree.evict(insert(tree, "abxy")[0])
    assert outline(tree) == {"ab": "branch", "abcd": "state", "abxy": "ghost"}
    tree.evict(insert(tree, "q")[0])
    assert outline(tree) == {"abcd": "state", "q": "ghost"}
    check_invariants(tree)


def test_more_may_die_at_once_than_can_be_remembered() -> None:
    tree = RadixTree(max_ghosts=1)
    insert(tree, "abcd")
    tree.evict(insert(tree, "abxy")[0])
    tree.evict(at(tree, "abcd"))
    assert ghosts(tree) == ["ab"]
    check_invariants(tree)


def test_a_ghost_remembers_how_often_its_state_was_used() -> None:
    tree = RadixTree(max_ghosts=1)
    (node,) = insert(tree, "abcd")
    node.num_hits = 3
    tree.evict(node)
    assert insert(tree, "abcd")[0].num_hits == 3


def test_ghosts_hold_no_memory() -> None:
    tree = RadixTree(max_ghosts=9)
    tree.evict(insert(tree, "abcd")[0])
    assert (tree.num_tokens, tree.num_states, tree.num_nodes) == (0, 0, 0)
    assert not list(tree.nodes())


def test_ghosts_are_bounded_by_their_tokens_too() -> None:
    """Three prefixes of 4, 3 and 2 tokens are evicted in turn, with room for 6 ghost tokens: the first is forgotten."""
    tree = RadixTree(max_ghosts=10, max_ghost_tokens=6)
    for word in ("abcd", "xyz", "uv"):
        (node,) = insert(tree, word, len(word))
        tree.evict(node)
        check_invariants(tree)
    assert [ghost.depth for ghost in tree.ghosts] == [3, 2]
    assert tree.num_ghost_tokens == 5
    with pytest.raises(ValueError, match="max_ghost_tokens must be at least 0, got -1"):
        RadixTree(max_ghost_tokens=-1)
