"""Marconi's admission, worked by hand."""

from collections.abc import Sequence

import pytest

from marconi.policy.admission.plan import Judicious
from marconi.policy.request import Request, pack
from marconi.tree import RadixTree

PREFIX = range(100)


def request(prompt: Sequence[int], num_output: int = 10, first_output: int = 10_000) -> Request:
    path = [*prompt, *range(first_output, first_output + num_output)]
    return Request(pack(path), len(prompt), num_output, len(path), 0.0)


def serve(tree: RadixTree, new: Request, rule: Judicious) -> list[int]:
    """The depths at which `new` leaves states."""
    depths = list(rule.depths(new, tree.match(new.path, new.num_prompt_tokens - 1)))
    tree.insert(new.path, depths)
    return depths


def branch(index: int) -> list[int]:
    """The prefix, then 50 tokens of its own."""
    return [*PREFIX, *range(1000 * index, 1000 * index + 50)]


def test_the_first_occurrence_leaves_its_last_decoded_token() -> None:
    assert serve(RadixTree(), request(branch(1)), Judicious()) == [159]


def test_the_second_occurrence_leaves_the_branch_point_too() -> None:
    tree = RadixTree()
    serve(tree, request(branch(1)), Judicious())
    assert serve(tree, request(branch(2)), Judicious()) == [100, 159]


def test_the_third_occurrence_starts_from_the_branch_point() -> None:
    tree = RadixTree()
    serve(tree, request(branch(1)), Judicious())
    serve(tree, request(branch(2)), Judicious())
    third = request(branch(3))
    assert tree.match(third.path, 149).checkpoint.depth == 100
    assert serve(tree, third, Judicious()) == [159]


def test_a_conversation_goes_on_from_its_last_decoded_token() -> None:
    tree = RadixTree()
    first = request(branch(1))
    serve(tree, first, Judicious())
    turn = [*branch(1), *range(10_000, 10_010), *range(5_000, 5_020)]
    match = tree.match(pack(turn), len(turn) - 1)
    assert match.checkpoint.depth == 159
    assert list(Judicious().depths(request(turn, first_output=20_000), match)) == [189]


def test_a_ghost_makes_the_next_occurrence_the_second() -> None:
    tree = RadixTree(max_ghosts=10)
    serve(tree, request(branch(1)), Judicious())
    tree.evict(next(tree.nodes()))
    assert tree.num_tokens == 0
    assert serve(tree, request(branch(2)), Judicious()) == [100, 159]


def test_without_ghosts_what_was_evicted_is_forgotten() -> None:
    tree = RadixTree()
    serve(tree, request(branch(1)), Judicious())
    tree.evict(next(tree.nodes()))
    assert serve(tree, request(branch(2)), Judicious()) == [159]


@pytest.mark.parametrize("first_output", [10_000, 20_000], ids=["the same answer", "another answer"])
def test_a_prompt_repeated_whole_branches_one_token_before_its_end(first_output: int) -> None:
    tree = RadixTree()
    serve(tree, request(branch(1)), Judicious())
    again = request(branch(1), first_output=first_output)
    assert serve(tree, again, Judicious()) == [149, 159]
    assert tree.match(again.path, 149).checkpoint.depth == 149


def test_a_grid_cuts_both_positions_down() -> None:
    tree = RadixTree()
    rule = Judicious(grid_tokens=64)
    assert serve(tree, request(branch(1)), rule) == [128]
    assert serve(tree, request(branch(2)), rule) == [64, 128]


def test_a_branch_point_on_the_grid_of_the_end_is_one_state() -> None:
    tree = RadixTree()
    rule = Judicious(grid_tokens=64)
    serve(tree, request([*PREFIX, *range(1000, 1100)]), rule)
    assert serve(tree, request([*PREFIX, 2000], num_output=5), rule) == [64]


def test_a_branch_point_that_the_hit_covers_is_not_kept_again() -> None:
    tree = RadixTree()
    rule = Judicious(grid_tokens=64)
    serve(tree, request(branch(1)), rule)
    serve(tree, request(branch(2)), rule)
    assert serve(tree, request(branch(3)), rule) == [128]


def test_a_grid_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="grid_tokens must be 1 or more, got 0"):
        Judicious(0)
