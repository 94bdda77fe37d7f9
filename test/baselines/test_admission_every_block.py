"""A state at every block."""

import pytest

from marconi.policy.request import Request, pack
from marconi.replay.admission.every_block import EveryBlock
from marconi.tree import RadixTree


def request(num_prompt: int, num_output: int) -> Request:
    num_tokens = num_prompt + num_output
    return Request(pack(range(num_tokens)), num_prompt, num_output, num_tokens, 0.0)


def test_every_full_block_that_is_processed_gets_a_state() -> None:
    new = request(num_prompt=70, num_output=27)
    assert list(EveryBlock(32).depths(new, RadixTree().match(new.path, 69))) == [32, 64, 96]


def test_the_last_sampled_token_ends_no_block() -> None:
    new = request(num_prompt=70, num_output=26)
    assert list(EveryBlock(32).depths(new, RadixTree().match(new.path, 69))) == [32, 64]


def test_blocks_up_to_the_hit_are_there_already() -> None:
    tree = RadixTree()
    new = request(num_prompt=200, num_output=1)
    tree.insert(new.path, EveryBlock(32).depths(request(100, 1), tree.match(new.path, 99)))
    match = tree.match(new.path, 199)
    assert match.checkpoint.depth == 96
    assert list(EveryBlock(32).depths(new, match)) == [128, 160, 192]


def test_tokens_that_are_not_known_get_no_state() -> None:
    partial = Request(pack(range(3)), 150, 20, num_known_tokens=128, arrival_s=0.0)
    assert list(EveryBlock(64).depths(partial, RadixTree(64).match(partial.path, 149))) == [64, 128]


def test_a_request_shorter_than_a_block_leaves_nothing() -> None:
    new = request(num_prompt=31, num_output=1)
    assert not EveryBlock(32).depths(new, RadixTree().match(new.path, 30))


def test_a_block_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block_tokens must be 1 or more, got 0"):
        EveryBlock(0)


def test_a_grid_has_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="grid_tokens must be 1 or more, got 0"):
        EveryBlock(32, 0)
