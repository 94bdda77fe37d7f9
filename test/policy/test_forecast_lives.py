"""The ring of lives."""

import random

import numpy as np
import pytest

from marconi.policy.forecast.forecast import Lives


def test_a_life_that_goes_on_is_as_old_as_the_clock_says() -> None:
    lives = Lives(4, 2)
    lives.begin(7, 3, (1, 2), 10.0)
    strata, levels, used, ages_s = lives.seen(25.0)
    assert (strata.tolist(), levels.tolist(), used.tolist()) == ([3], [[1, 2]], [False])
    assert ages_s.tolist() == [15.0]


def test_a_life_ends_once_in_a_use_or_in_none() -> None:
    lives = Lives(4, 0)
    for serial in (1, 2):
        lives.begin(serial, 0, (), 0.0)
    lives.end(1, 5.0, used=True)
    lives.end(1, 9.0)
    lives.end(2, 6.0)
    lives.end(3, 6.0, used=True)
    assert lives.seen(100.0).ages_s.tolist() == [5.0, 6.0]
    assert lives.seen(0.0).used.tolist() == [True, False]


def test_a_life_of_no_time_counts_as_a_millisecond() -> None:
    lives = Lives(4, 0)
    lives.begin(1, 0, (), 5.0)
    assert lives.seen(5.0).ages_s.tolist() == [1e-3]


def test_a_state_has_one_life_and_the_one_before_ends_unused() -> None:
    lives = Lives(4, 0)
    lives.begin(1, 0, (), 0.0)
    lives.begin(1, 5, (), 3.0)
    assert lives.going_on[1][1] == 5
    assert lives.seen(10.0).ages_s.tolist() == [3.0, 7.0]
    lives.end(1, 8.0, used=True)
    assert 1 not in lives.going_on
    assert lives.seen(0.0).used.tolist() == [False, True]


def test_the_oldest_life_gives_way_and_its_end_is_of_no_account() -> None:
    lives = Lives(2, 0)
    for serial in (1, 2, 3):
        lives.begin(serial, serial, (), float(serial))
    assert len(lives) == 2
    assert 1 not in lives.going_on
    lives.end(1, 9.0, used=True)
    assert sorted(lives.seen(0.0).strata.tolist()) == [2, 3]
    assert not lives.seen(0.0).used.any(), "its slot is another's"


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be >= 1 life, got 0"):
        Lives(0, 1)


def test_the_ring_holds_what_a_list_of_all_lives_ends_with() -> None:
    rng = random.Random(2)  # noqa: S311 - test data
    capacity = 20
    ring = Lives(capacity, 1)
    listed: list[list[float]] = []  # serial, stratum, level, began, ended, used
    now_s = 0.0

    def end(serial: int, used: bool) -> None:
        for life in listed[-capacity:]:
            if life[0] == serial and np.isnan(life[4]):
                life[4:] = [now_s, used]

    for _ in range(2000):
        now_s += rng.random()
        serial = rng.randrange(30)
        if rng.random() < 0.5:
            stratum, level = rng.randrange(4), rng.randrange(3)
            ring.begin(serial, stratum, (level,), now_s)
            end(serial, used=False)
            listed.append([serial, stratum, level, now_s, np.nan, False])
        else:
            used = rng.random() < 0.5
            ring.end(serial, now_s, used=used)
            end(serial, used)
        strata, levels, was_used, ages_s = ring.seen(now_s)
        held = sorted(zip(ages_s.tolist(), strata.tolist(), levels[:, 0].tolist(), was_used.tolist(), strict=True))
        expected = [
            (max((now_s if np.isnan(life[4]) else life[4]) - life[3], 1e-3), life[1], life[2], bool(life[5]))
            for life in listed[-capacity:]
        ]
        assert held == sorted(expected)
        assert len(ring.going_on) <= capacity


def test_of_a_state_whose_life_gave_way_nothing_is_kept() -> None:
    ring = Lives(8, 0)
    for serial in range(1000):
        ring.begin(serial, 0, (), float(serial))
    assert set(ring.going_on) == set(range(992, 1000))
