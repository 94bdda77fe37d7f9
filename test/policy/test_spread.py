"""The least and the greatest number are those of a sorted list, whatever comes and goes."""

import random

import pytest

from marconi.policy.eviction.spread import Spread


def test_nothing_has_neither_a_least_nor_a_greatest() -> None:
    spread = Spread()
    assert (spread.least(), spread.greatest()) == (None, None)
    spread.add(1.0)
    spread.remove(1.0)
    assert (spread.least(), spread.greatest()) == (None, None)


def test_one_of_several_equal_numbers_may_go() -> None:
    spread = Spread()
    for number in (2.0, 1.0, 1.0):
        spread.add(number)
    spread.remove(1.0)
    assert (spread.least(), spread.greatest()) == (1.0, 2.0)
    spread.remove(1.0)
    assert (spread.least(), spread.greatest()) == (2.0, 2.0)


def test_what_is_not_there_cannot_go() -> None:
    with pytest.raises(KeyError):
        Spread().remove(1.0)


@pytest.mark.parametrize("num_kinds", [3, 1000])
def test_random_operations_agree_with_a_sorted_list(num_kinds: int) -> None:
    rng = random.Random(num_kinds)  # noqa: S311 - test data
    spread, held = Spread(), list[float]()
    for _ in range(5_000):
        if held and rng.random() < 0.48:
            spread.remove(held.pop(rng.randrange(len(held))))
        else:
            held.append(float(rng.randrange(num_kinds)))
            spread.add(held[-1])
        if rng.random() < 0.5:
            assert spread.least() == min(held, default=None)
            assert spread.greatest() == max(held, default=None)


def test_numbers_that_are_gone_take_no_more_room_than_those_that_are_there() -> None:
    spread = Spread()
    for number in range(10_000):
        spread.add(float(number))
        if number >= 100:
            spread.remove(float(number - 100))
        assert max(len(spread._rising), len(spread._falling)) <= 64 + 2 * 101
