"""Evicting: what is freed, what dies with it, what is merged; and what a lock keeps."""

import sys

import pytest

from marconi.tree import Freed, RadixTree, check_invariants

from .letters import at, insert, outline, path, text_of


def test_a_leaf_frees_its_state_and_its_span() -> None:
    tree = RadixTree()
    insert(tree, "abcdef", 2, 6)
    assert tree.evict(at(tree, "abcdef")) == Freed(num_tokens=4, num_states=1)
    assert outline(tree) == {"ab": "state"}
    assert (tree.num_tokens, tree.num_states, tree.num_nodes) == (2, 1, 1)
    check_invariants(tree)


def test_a_node_with_a_child_frees_its_state_only_and_is_merged_into_the_child() -> None:
    tree = RadixTree()
    insert(tree, "abcdef", 2, 6)
    end = at(tree, "abcdef")
    assert tree.evict(at(tree, "ab")) == Freed(num_tokens=0, num_states=1)
    assert outline(tree) == {"abcdef": "state"}
    assert at(tree, "abcdef") is end
    assert (tree.num_tokens, tree.num_states, tree.num_nodes) == (6, 1, 1)
    check_invariants(tree)


def test_a_node_with_several_children_keeps_its_kv() -> None:
    tree = RadixTree()
    insert(tree, "abcd", 2, 4)
    insert(tree, "abxy")
    assert tree.evict(at(tree, "ab")) == Freed(0, 1)
    assert outline(tree) == {"ab": "branch", "abcd": "state", "abxy": "state"}
    check_invariants(tree)


def test_kv_above_that_no_state_can_use_any_more_dies_with_the_leaf() -> None:
    tree = RadixTree(max_ghosts=9)
    insert(tree, "abcd")
    tree.evict(insert(tree, "abxy")[0])
    assert outline(tree) == {"ab": "branch", "abcd": "state", "abxy": "ghost"}
    leaf = at(tree, "abcd")
    assert leaf.freed_tokens == 4
    assert tree.evict(leaf) == Freed(num_tokens=4, num_states=1)
    assert outline(tree) == {"ab": "ghost", "abcd": "ghost", "abxy": "ghost"}
    assert tree.num_tokens == 0
    check_invariants(tree)


def test_the_cascade_ends_at_a_state_and_at_a_branch() -> None:
    tree = RadixTree()
    insert(tree, "abcdef", 2, 6)
    insert(tree, "abxyzz", 4)
    insert(tree, "abxy12")
    assert tree.evict(at(tree, "abxy12")).num_tokens == 2
    assert tree.evict(at(tree, "abxy")).num_tokens == 2
    assert tree.evict(at(tree, "abcdef")).num_tokens == 4
    assert outline(tree) == {"ab": "state"}
    check_invariants(tree)


def test_a_branch_that_loses_all_but_one_child_is_merged() -> None:
    tree = RadixTree()
    insert(tree, "abcd")
    insert(tree, "abxy")
    tree.evict(at(tree, "abxy"))
    assert outline(tree) == {"abcd": "state"}
    check_invariants(tree)


def test_the_freed_tokens_of_a_node_are_those_that_its_eviction_frees() -> None:
    tree = RadixTree(unit_tokens=4, max_ghosts=2)
    for text in ("abcd", "abxy", "abxz", "ab", "q", "abcdef"):
        insert(tree, text)
    while tree.num_states:
        node = next(node for node in tree.nodes() if node.has_state)
        expected = node.freed_tokens
        assert tree.evict(node).num_tokens == expected, text_of(node)
        check_invariants(tree)
    assert tree.num_tokens == tree.num_nodes == 0


def test_the_last_pass_of_a_leaf_reaches_the_node_above_it() -> None:
    tree = RadixTree()
    upper, lower = insert(tree, "abcd", 2, 4)
    upper.last_pass_s, lower.last_pass_s = 1.0, 2.0
    tree.evict(lower)
    assert upper.last_pass_s == 2.0


def test_a_leaf_does_not_grow_younger_when_a_node_above_is_merged_into_it() -> None:
    tree = RadixTree()
    upper, middle, lower = insert(tree, "abcdef", 2, 4, 6)
    upper.last_pass_s, middle.last_pass_s, lower.last_pass_s = 1.0, 5.0, 3.0
    tree.evict(middle)
    assert lower.last_pass_s == 3.0, "no request ran through it since"
    tree.evict(lower)
    assert upper.last_pass_s == 5.0, "what ran through the merged node ran through here"


# Locks


def test_a_locked_node_is_not_evicted_until_its_last_lock_is_given_back() -> None:
    tree = RadixTree()
    (node,) = insert(tree, "abcd")
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert node.num_locks
    with pytest.raises(AssertionError, match="locked"):
        tree.evict(node)
    tree.unlock(node)
    assert tree.evict(node) == Freed(4, 1)


def test_a_lock_keeps_all_kv_of_its_path_while_states_above_may_go() -> None:
    tree = RadixTree()
    _, lower = insert(tree, "abcd", 2, 4)
    tree.lock(lower)
    tree.evict(at(tree, "ab"))
    assert tree.num_tokens == 4
    assert lower.num_locks
    check_invariants(tree)


def test_only_the_first_lock_and_the_last_unlock_change_whether_a_node_is_evictable() -> None:
    tree = RadixTree()
    (node,) = insert(tree, "abcd")
    tree.take_changed()
    noted = []
    for change in (tree.lock, tree.lock, tree.unlock, tree.unlock):
        change(node)
        noted.append(len(tree.take_changed()))
    assert noted == [1, 0, 0, 1]


def test_a_root_can_be_locked_and_a_branch_without_a_state_cannot() -> None:
    tree = RadixTree()
    insert(tree, "abcd")
    insert(tree, "abxy")
    tree.lock(tree.root())
    tree.unlock(tree.root())
    with pytest.raises(AssertionError, match="no state to lock"):
        tree.lock(at(tree, "ab"))
    with pytest.raises(AssertionError, match="not locked"):
        tree.unlock(at(tree, "abcd"))


@pytest.mark.parametrize(("text", "match"), [("ab", "no state"), ("abxy", "holds nothing")])
def test_a_branch_and_a_ghost_cannot_be_evicted(text: str, match: str) -> None:
    tree = RadixTree(max_ghosts=9)
    insert(tree, "abcd")
    tree.evict(insert(tree, "abxy")[0])
    with pytest.raises(AssertionError, match=match):
        tree.evict(at(tree, text))


# Depth


def test_a_tree_deeper_than_the_recursion_limit_works() -> None:
    tree = RadixTree(max_ghosts=1 << 20)
    depth = sys.getrecursionlimit() + 100
    text = "a" * depth
    made = insert(tree, text, *range(1, depth + 1))
    assert tree.match(path(text), depth).checkpoint is made[-1]
    check_invariants(tree)
    # A ghost beside each node keeps what has no state from being merged: the whole path dies in one eviction.
    for end in range(1, depth):
        tree.evict(insert(tree, text[:end] + "b")[0])
    for node in made[:-1]:
        tree.evict(node)
    check_invariants(tree)
    assert (made[-1].freed_tokens, made[-1].checkpoint_depth_above) == (depth, 0)
    assert tree.evict(made[-1]) == Freed(depth, 1)
    assert (tree.num_nodes, len(tree.ghosts)) == (0, 2 * depth - 1)
    check_invariants(tree)
