"""`check_invariants` passes sound trees and turns red on each way to break one."""

from collections.abc import Callable

import pytest

from marconi.tree import Node, RadixTree, check_invariants
from marconi.tree.node import ID_BYTES

from .letters import at, insert, outline, path


def sound_tree() -> RadixTree:
    """State at 'a', a branch without one at 'ab', a chain of ghosts below 'abxy', and a namespace of its own."""
    tree = RadixTree(max_ghosts=4)
    insert(tree, "abcd", 1, 4)
    insert(tree, "abef")
    insert(tree, "abxyz", 4, 5)
    tree.evict(at(tree, "abxyz"))
    tree.evict(at(tree, "abxy"))
    insert(tree, "abcd", namespace=1)
    return tree


def test_a_sound_tree_passes() -> None:
    tree = sound_tree()
    kinds = {"a": "state", "ab": "branch", "abcd": "state", "abef": "state", "abxy": "ghost", "abxyz": "ghost"}
    assert outline(tree) == kinds
    check_invariants(tree)
    check_invariants(RadixTree())


def root_is_a_ghost(tree: RadixTree) -> None:
    tree.root().is_live = False


def root_has_a_state(tree: RadixTree) -> None:
    tree.root().has_state = True


def root_has_a_parent(tree: RadixTree) -> None:
    tree.root().parent = tree.root(1)


def live_children_miscounted(tree: RadixTree) -> None:
    at(tree, "ab").live_children[at(tree, "abxy")] = None


def parent_mistaken(tree: RadixTree) -> None:
    at(tree, "abcd").parent = at(tree, "a")


def held_under_another_unit(tree: RadixTree) -> None:
    branch = at(tree, "ab")
    branch.children[path("q")] = branch.children.pop(path("c"))


def span_is_empty(tree: RadixTree) -> None:
    leaf = at(tree, "abcd")
    branch = at(tree, "ab")
    branch.children[b""] = branch.children.pop(leaf.key[:ID_BYTES])
    leaf.key = b""


def depth_is_wrong(tree: RadixTree) -> None:
    at(tree, "abcd").depth += 1


def lives_below_a_ghost(tree: RadixTree) -> None:
    ghost, leaf = at(tree, "abxy"), at(tree, "abcd")
    del at(tree, "ab").children[leaf.key[:ID_BYTES]]
    del at(tree, "ab").live_children[leaf]
    at(tree, "ab").num_children -= 1
    ghost.children, ghost.live_children = {leaf.key[:ID_BYTES]: leaf}, {leaf: None}
    leaf.parent = ghost
    leaf.depth = ghost.depth + 2


def state_above_mistaken(tree: RadixTree) -> None:
    at(tree, "abcd").checkpoint_depth_above += 1


def number_of_live_children_stale(tree: RadixTree) -> None:
    at(tree, "ab").num_children += 1


def freed_tokens_stale(tree: RadixTree) -> None:
    at(tree, "abcd").freed_tokens -= 1


def locked_without_a_state(tree: RadixTree) -> None:
    at(tree, "ab").num_locks = 1


def leaf_without_a_state(tree: RadixTree) -> None:
    at(tree, "abcd").has_state = False


def not_merged_into_its_only_child(tree: RadixTree) -> None:
    at(tree, "a").has_state = False


def ghost_with_a_state(tree: RadixTree) -> None:
    at(tree, "abxyz").has_state = True


def ghost_is_locked(tree: RadixTree) -> None:
    at(tree, "abxyz").num_locks = 1


def lock_uncounted(tree: RadixTree) -> None:
    next(node for node in tree.nodes() if node.has_state).num_locks = 1


def tokens_miscounted(tree: RadixTree) -> None:
    tree.num_tokens += 1


def states_miscounted(tree: RadixTree) -> None:
    tree.num_states += 1


def nodes_miscounted(tree: RadixTree) -> None:
    tree.num_nodes -= 1


def ghost_missing_from_the_queue(tree: RadixTree) -> None:
    del tree.ghosts[at(tree, "abxyz")]


def stranger_in_the_queue(tree: RadixTree) -> None:
    tree.ghosts[Node(path("q"), None, 1, 99)] = None


def too_many_ghosts(tree: RadixTree) -> None:
    tree.max_ghosts = 1


def ghost_older_than_what_is_below_it(tree: RadixTree) -> None:
    tree.ghosts.move_to_end(at(tree, "abxyz"))


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (root_is_a_ghost, ""),
        (root_has_a_state, ""),
        (root_has_a_parent, ""),
        (live_children_miscounted, "live children"),
        (parent_mistaken, "its parent does not know it"),
        (held_under_another_unit, "held under another unit"),
        (span_is_empty, "an empty span"),
        (depth_is_wrong, "depth and span disagree"),
        (lives_below_a_ghost, "lives below a ghost"),
        (state_above_mistaken, "depth of the state above"),
        (number_of_live_children_stale, "number of live children"),
        (freed_tokens_stale, "tokens that its eviction frees"),
        (locked_without_a_state, "locked without a state"),
        (leaf_without_a_state, "dead KV"),
        (not_merged_into_its_only_child, "not merged into its only child"),
        (ghost_with_a_state, "a ghost holds no state"),
        (ghost_is_locked, "a ghost is not locked"),
        (lock_uncounted, "the locked nodes are those that have locks"),
        (tokens_miscounted, ""),
        (states_miscounted, ""),
        (nodes_miscounted, ""),
        (ghost_missing_from_the_queue, "every ghost stands in the queue"),
        (stranger_in_the_queue, "every ghost stands in the queue"),
        (too_many_ghosts, ""),
        (ghost_older_than_what_is_below_it, "is younger than the ghost above it"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_broken_tree_is_red(fault: Callable[[RadixTree], None], match: str) -> None:
    tree = sound_tree()
    fault(tree)
    with pytest.raises(AssertionError, match=match):
        check_invariants(tree)
