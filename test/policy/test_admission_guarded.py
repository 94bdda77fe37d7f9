"""Judicious admission with a guard, worked by hand."""

import pytest

from marconi.policy.admission.plan import MIN_GAIN, Guarded, Judicious
from marconi.policy.base import Costs
from marconi.policy.forecast.turns import REQUESTS_A_CHOICE, DivergenceWindow
from marconi.policy.request import Request, pack
from marconi.tree import RadixTree

COSTS = Costs(kv_bytes_per_token=1, state_bytes=100, flops=float)


def window(distance_tokens: int, gain_tokens: float = 1e6) -> DivergenceWindow:
    chosen = DivergenceWindow()
    chosen.distance_tokens, chosen.gain_tokens = distance_tokens, gain_tokens
    return chosen


def request(*spans: tuple[int, int], num_output: int = 1) -> Request:
    """Spans of (first id, length), the last token being the output."""
    ids = [first + offset for first, length in spans for offset in range(length)]
    return Request(pack(ids), len(ids) - num_output, num_output, len(ids), 0.0)


def depths(rule: Guarded, tree: RadixTree, new: Request) -> list[int]:
    return list(rule.depths(new, tree.match(new.path, new.num_prompt_tokens - 1)))


def test_a_guard_stands_at_the_distance_before_the_end() -> None:
    rule = Guarded(Judicious(), window(30), COSTS)
    assert depths(rule, RadixTree(), request((0, 101))) == [70, 100]


def test_while_no_distance_is_known_there_is_no_guard() -> None:
    rule = Guarded(Judicious(), DivergenceWindow(), COSTS)
    assert depths(rule, RadixTree(), request((0, 101))) == [100]


@pytest.mark.parametrize(("distance", "expected"), [(99, [1, 100]), (100, [100]), (101, [100]), (5000, [100])])
def test_a_guard_at_the_root_or_before_it_is_none(distance: int, expected: list[int]) -> None:
    assert depths(Guarded(Judicious(), window(distance), COSTS), RadixTree(), request((0, 101))) == expected


@pytest.mark.parametrize(("distance", "expected"), [(40, [60, 100]), (50, [100]), (60, [100])])
def test_a_guard_lies_beyond_the_state_that_the_request_starts_from(distance: int, expected: list[int]) -> None:
    tree = RadixTree()
    tree.insert(request((0, 50)).path, [50])
    assert depths(Guarded(Judicious(), window(distance), COSTS), tree, request((0, 101))) == expected


@pytest.mark.parametrize(("distance", "expected"), [(20, [50, 80, 100]), (50, [50, 100]), (70, [50, 100])])
def test_a_guard_lies_beyond_the_branch_point(distance: int, expected: list[int]) -> None:
    tree = RadixTree()
    tree.insert(request((0, 80)).path, [80])
    assert depths(Guarded(Judicious(), window(distance), COSTS), tree, request((0, 50), (900, 51))) == expected


def test_a_guard_is_cut_down_to_the_grid() -> None:
    rule = Guarded(Judicious(16), window(5), COSTS)
    assert depths(rule, RadixTree(), request((0, 101))) == [80, 96]
    assert depths(Guarded(Judicious(16), window(16), COSTS), RadixTree(), request((0, 101))) == [80, 96]
    assert depths(Guarded(Judicious(16), window(17), COSTS), RadixTree(), request((0, 101))) == [64, 96]


def test_a_request_that_leaves_nothing_leaves_no_guard() -> None:
    tree = RadixTree()
    tree.insert(request((0, 101)).path, [100])
    longer = request((0, 101), (500, 1))
    assert depths(Guarded(Judicious(64), window(10), COSTS), tree, longer) == []


def test_guards_have_to_be_worth_their_memory() -> None:
    least = MIN_GAIN * COSTS.state_bytes / COSTS.kv_bytes_per_token
    assert depths(Guarded(Judicious(), window(30, least), COSTS), RadixTree(), request((0, 101))) == [70, 100]
    assert depths(Guarded(Judicious(), window(30, 0.99 * least), COSTS), RadixTree(), request((0, 101))) == [100]


def test_a_guard_serves_the_prompt_that_leaves_the_path_there() -> None:
    tree = RadixTree()
    rule = Guarded(Judicious(), window(30), COSTS)
    first = request((0, 101))
    tree.insert(first.path, depths(rule, tree, first))
    assert tree.match(request((0, 70), (700, 31)).path, 99).checkpoint.depth == 70
    assert depths(rule, tree, request((0, 70), (700, 31))) == [100], "its own guard would be where it starts"


def test_the_distance_is_that_of_the_window_at_the_time_of_the_request() -> None:
    learned = DivergenceWindow()
    rule = Guarded(Judicious(), learned, COSTS)
    for _ in range(REQUESTS_A_CHOICE):
        assert depths(rule, RadixTree(), request((0, 101))) == [100]
        learned.observe(25, 75)
    assert depths(rule, RadixTree(), request((0, 101))) == [75, 100]
