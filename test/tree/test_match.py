"""Matching: how much of a path is held, how much is remembered, and the deepest state that may be used."""

import numpy as np
import pytest

from marconi.tree import Match, RadixTree
from marconi.tree.node import ID_BYTES, common_bytes

from .letters import at, insert, path, text_of

NO_LIMIT = 1 << 30


def match(tree: RadixTree, text: str, max_tokens: int = NO_LIMIT, namespace: int = 0) -> tuple[str, int, int, bool]:
    found: Match = tree.match(path(text), max_tokens, namespace)
    return text_of(found.checkpoint), found.num_live_tokens, found.num_seen_tokens, found.diverges


def test_an_empty_tree_knows_nothing() -> None:
    tree = RadixTree()
    assert match(tree, "abc") == ("", 0, 0, False)
    assert match(tree, "") == ("", 0, 0, False)


def test_an_empty_path_diverges_from_whatever_is_held() -> None:
    tree = RadixTree()
    insert(tree, "abc")
    assert match(tree, "") == ("", 0, 0, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcd", ("abcd", 4, 4, False)),
        ("abcdef", ("abcd", 4, 4, False)),
        ("abc", ("", 3, 3, True)),
        ("abcx", ("", 3, 3, True)),
        ("x", ("", 0, 0, True)),
    ],
)
def test_a_state_is_usable_at_its_exact_position_only(text: str, expected: tuple[str, int, int, bool]) -> None:
    tree = RadixTree()
    insert(tree, "abcd")
    assert match(tree, text) == expected


def test_a_path_that_parts_in_the_middle_of_an_edge_uses_the_state_above_it() -> None:
    tree = RadixTree()
    insert(tree, "abcdef", 2, 6)
    assert match(tree, "abcdxx") == ("ab", 4, 4, True)


def test_an_end_at_a_node_diverges_if_something_goes_on_from_it() -> None:
    tree = RadixTree()
    insert(tree, "abcd", 2, 4)
    assert match(tree, "abx") == ("ab", 2, 2, True)
    assert match(tree, "ab") == ("ab", 2, 2, True)
    assert match(tree, "abcdx") == ("abcd", 4, 4, False)


def test_no_state_beyond_the_limit_is_used_but_what_is_held_is_known() -> None:
    tree = RadixTree()
    insert(tree, "abcdef", 2, 4, 6)
    assert match(tree, "abcdef", 6)[0] == "abcdef"
    assert match(tree, "abcdef", 5) == ("abcd", 6, 6, False)
    assert match(tree, "abcdef", 1) == ("", 6, 6, False)


def test_a_branch_without_a_state_is_not_a_hit() -> None:
    tree = RadixTree()
    insert(tree, "abcd")
    insert(tree, "abxy")
    assert match(tree, "abz") == ("", 2, 2, True)


def test_a_ghost_is_seen_but_not_held() -> None:
    tree = RadixTree(max_ghosts=9)
    insert(tree, "abcdef", 2, 6)
    tree.evict(at(tree, "abcdef"))
    assert match(tree, "abcdef") == ("ab", 2, 6, False)
    assert match(tree, "abcdxx") == ("ab", 2, 4, True)


def test_the_deepest_ghost_run_through_wholly_within_the_limit_is_named() -> None:
    tree = RadixTree(max_ghosts=9)
    insert(tree, "abcdef", 2, 4, 6)
    for text in ("abcdef", "abcd"):
        tree.evict(at(tree, text))
    ghosts = {max_tokens: tree.match(path("abcdefg"), max_tokens).ghost for max_tokens in (3, 5, NO_LIMIT)}
    assert ghosts == {3: None, 5: at(tree, "abcd"), NO_LIMIT: at(tree, "abcdef")}
    assert tree.match(path("abcdx"), NO_LIMIT).ghost is at(tree, "abcd")


def test_namespaces_share_nothing() -> None:
    tree = RadixTree()
    insert(tree, "abcd", namespace=7)
    assert match(tree, "abcd") == ("", 0, 0, False)
    assert match(tree, "abcd", namespace=7) == ("abcd", 4, 4, False)


def test_depths_count_tokens_where_a_unit_is_several() -> None:
    tree = RadixTree(unit_tokens=16)
    insert(tree, "abc", 32, 48)
    assert match(tree, "abxx") == ("ab", 32, 32, True)
    assert match(tree, "abc", 47) == ("ab", 48, 48, False)
    assert match(tree, "abc", 48) == ("abc", 48, 48, False)


def test_matching_changes_nothing() -> None:
    tree = RadixTree()
    insert(tree, "abcd")
    tree.take_changed()
    match(tree, "abx")
    assert not tree.take_changed()
    assert (tree.num_nodes, tree.num_tokens, tree.num_states) == (1, 4, 1)


@pytest.mark.parametrize("size", range(1, 20))
def test_the_first_difference_is_found_wherever_it_is(size: int) -> None:
    tree = RadixTree()
    held = "a" * 19
    insert(tree, held)
    assert match(tree, held[:size] + "b" * 9)[1] == size


@pytest.mark.parametrize("unit_ids", [1, 3])
@pytest.mark.parametrize("num_same", [0, 1, 15, 16, 17, 48, 300])
def test_what_two_paths_share_after_their_starts_ends_with_their_last_whole_unit(num_same: int, unit_ids: int) -> None:
    shared, left_ids, right_ids = [*range(7, 7 + num_same)], [1] * 3 * unit_ids, [2] * unit_ids
    left = np.array([*left_ids, *shared, 3, *shared], np.uint32).tobytes()
    starts = (len(left_ids) * ID_BYTES, len(right_ids) * ID_BYTES)
    for end in ([], [4]):
        right = np.array([*right_ids, *shared, *end], np.uint32).tobytes()
        whole = num_same // unit_ids * unit_ids * ID_BYTES
        assert common_bytes(left, right, unit_ids * ID_BYTES, *starts) == whole
        assert common_bytes(right, left, unit_ids * ID_BYTES, *reversed(starts)) == whole
        assert common_bytes(left, right) == 0, "without the starts they differ at once"
