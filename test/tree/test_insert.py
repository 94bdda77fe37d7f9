"""Inserting: nodes at exact positions, splits, revived ghosts, and what bad checkpoints get."""

import pytest

from marconi.tree import RadixTree, check_invariants

from .letters import at, insert, outline, path, text_of


def test_a_state_stands_at_each_checkpoint_and_the_nodes_come_back_in_order() -> None:
    tree = RadixTree()
    made = insert(tree, "abcdef", 1, 4, 6)
    assert [text_of(node) for node in made] == ["a", "abcd", "abcdef"]
    assert [node.depth for node in made] == [1, 4, 6]
    assert (tree.num_tokens, tree.num_states, tree.num_nodes) == (6, 3, 3)
    check_invariants(tree)


def test_what_lies_beyond_the_last_checkpoint_is_not_held() -> None:
    tree = RadixTree()
    insert(tree, "abcdef", 4)
    assert outline(tree) == {"abcd": "state"}
    assert tree.num_tokens == 4


def test_no_checkpoint_holds_nothing() -> None:
    tree = RadixTree()
    assert tree.insert(path("abc"), ()) == []
    assert tree.num_nodes == tree.num_tokens == 0


def test_inserting_again_changes_nothing() -> None:
    tree = RadixTree()
    first = insert(tree, "abcd", 2, 4)
    tree.take_changed()
    assert insert(tree, "abcd", 2, 4) == first
    assert (tree.num_tokens, tree.num_states, tree.num_nodes) == (4, 2, 2)
    assert not tree.take_changed()


def test_a_checkpoint_in_the_middle_of_an_edge_splits_it_and_the_lower_node_keeps_its_identity() -> None:
    tree = RadixTree()
    (end,) = insert(tree, "abcd")
    (middle,) = insert(tree, "ab")
    assert outline(tree) == {"ab": "state", "abcd": "state"}
    assert at(tree, "abcd") is end
    assert end.parent is middle
    assert tree.num_tokens == 4
    check_invariants(tree)


def test_paths_that_part_in_the_middle_of_an_edge_share_a_branch_without_a_state() -> None:
    tree = RadixTree()
    insert(tree, "abcd")
    insert(tree, "abxyz")
    assert outline(tree) == {"ab": "branch", "abcd": "state", "abxyz": "state"}
    assert tree.num_tokens == 7
    assert at(tree, "ab").num_children == 2
    check_invariants(tree)


def test_a_branch_gets_its_state_when_asked_for() -> None:
    tree = RadixTree()
    insert(tree, "abcd")
    branch, _ = insert(tree, "abxy", 2, 4)
    assert branch.has_state
    assert outline(tree) == {"ab": "state", "abcd": "state", "abxy": "state"}


def test_a_ghost_comes_back_to_life_as_the_same_node() -> None:
    tree = RadixTree(max_ghosts=9)
    (node,) = insert(tree, "abcd")
    tree.evict(node)
    assert insert(tree, "abcd") == [node]
    assert not tree.ghosts
    assert (tree.num_tokens, tree.num_states, tree.num_nodes) == (4, 1, 1)
    check_invariants(tree)


def test_a_ghost_is_split_where_a_new_path_leaves_it_and_only_the_shared_part_lives() -> None:
    tree = RadixTree(max_ghosts=9)
    tree.evict(insert(tree, "abcd")[0])
    insert(tree, "abxy")
    assert outline(tree) == {"ab": "branch", "abcd": "ghost", "abxy": "state"}
    assert tree.num_tokens == 4
    check_invariants(tree)


def test_a_checkpoint_within_a_ghost_leaves_the_rest_a_ghost() -> None:
    tree = RadixTree(max_ghosts=9)
    tree.evict(insert(tree, "abcd")[0])
    insert(tree, "ab")
    assert outline(tree) == {"ab": "state", "abcd": "ghost"}
    assert tree.num_tokens == 2
    check_invariants(tree)


def test_a_ghost_on_the_way_to_a_deeper_checkpoint_leaves_no_node_of_its_own() -> None:
    tree = RadixTree(max_ghosts=9)
    tree.evict(insert(tree, "ab")[0])
    insert(tree, "abcd")
    assert outline(tree) == {"abcd": "state"}
    check_invariants(tree)


def test_the_same_path_in_two_namespaces_is_held_twice() -> None:
    tree = RadixTree()
    insert(tree, "abcd", namespace=0)
    insert(tree, "abcd", namespace=1)
    assert (tree.num_tokens, tree.num_states) == (8, 2)
    check_invariants(tree)


def test_a_block_counts_all_its_tokens() -> None:
    tree = RadixTree(unit_tokens=16)
    insert(tree, "abc", 16, 48)
    assert (tree.num_tokens, tree.num_states) == (48, 2)
    insert(tree, "axy", 48)
    assert tree.num_tokens == 80
    check_invariants(tree)


@pytest.mark.parametrize("depths", [(0,), (2, 2), (3, 1), (5,), (-1,)])
def test_a_checkpoint_out_of_order_or_off_the_path_is_refused_and_the_tree_stays_sound(depths: tuple[int, ...]) -> None:
    tree = RadixTree()
    with pytest.raises(ValueError, match=str(depths[-1])):
        insert(tree, "abcd", *depths)
    check_invariants(tree)


def test_a_checkpoint_inside_a_unit_is_refused() -> None:
    tree = RadixTree(unit_tokens=16)
    with pytest.raises(ValueError, match="num_tokens must be a multiple of 16, the unit, got 24"):
        insert(tree, "abcd", 24)


@pytest.mark.parametrize(
    ("unit_tokens", "max_ghosts", "named"), [(0, 0, "unit_tokens must be at least 1, got 0"), (1, -1, "max_ghosts")]
)
def test_a_tree_of_impossible_size_is_refused(unit_tokens: int, max_ghosts: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RadixTree(unit_tokens, max_ghosts)
