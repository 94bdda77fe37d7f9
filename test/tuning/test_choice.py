"""Which value is adopted, from gains by hand."""

import math

import pytest

from marconi.tuning.choice import choose, sure_gain


def test_what_one_window_shows_is_not_believed() -> None:
    assert choose([{0.0: 0.5, 1.0: 0.9}], current=0.0, margin=0.001, caution=1.0) == 0.0


def test_a_gain_that_lasts_is_adopted() -> None:
    assert choose([{0.0: 0.5, 1.0: 0.6}] * 3, current=0.0, margin=0.001, caution=1.0) == 1.0


def test_a_mean_gain_made_by_one_lucky_window_is_not_adopted() -> None:
    windows = [{0.0: 0.5, 1.0: 0.9}, {0.0: 0.5, 1.0: 0.4}, {0.0: 0.5, 1.0: 0.5}]
    assert choose(windows, current=0.0, margin=0.001, caution=1.0) == 0.0
    assert choose(windows, current=0.0, margin=0.001, caution=0.0) == 1.0


@pytest.mark.parametrize("current", [0.0, 1.0, 2.0])
def test_what_the_latest_window_says_is_worse_than_lru_is_never_adopted_or_kept(current: float) -> None:
    windows = [*[{0.0: 0.5, 1.0: 0.8, 2.0: 0.7}] * 5, {0.0: 0.5, 1.0: 0.499, 2.0: 0.499}]
    assert choose(windows, current, margin=0.001, caution=1.0) == 0.0


def test_another_value_takes_the_place_of_one_that_fell_behind_lru() -> None:
    windows = [*[{0.0: 0.5, 1.0: 0.8, 2.0: 0.7}] * 5, {0.0: 0.5, 1.0: 0.499, 2.0: 0.6}]
    assert choose(windows, current=1.0, margin=0.001, caution=1.0) == 2.0


def test_equal_values_leave_the_lowest() -> None:
    windows = [{0.0: 0.5, 1.0: 0.6, 2.0: 0.6, 4.0: 0.6}] * 3
    assert choose(windows, current=0.0, margin=0.001, caution=1.0) == 1.0


def test_a_tie_with_lru_is_lru() -> None:
    assert choose([{0.0: 0.5, 1.0: 0.5}] * 8, current=0.0, margin=0.0, caution=0.0) == 0.0
    assert choose([{0.0: 0.5, 1.0: 0.5}] * 8, current=1.0, margin=0.0, caution=0.0) == 0.0


@pytest.mark.parametrize("current", [1.0, 2.0])
def test_a_flat_objective_changes_nothing(current: float) -> None:
    windows = [{0.0: 0.5, 1.0: 0.6, 2.0: 0.6004}] * 4
    assert choose(windows, current, margin=0.001, caution=1.0) == current


def test_a_value_is_left_for_one_that_is_better_by_the_margin() -> None:
    assert choose([{0.0: 0.5, 1.0: 0.6, 2.0: 0.7}] * 4, current=1.0, margin=0.001, caution=1.0) == 2.0


def test_a_gain_below_the_margin_is_no_reason_to_leave_lru() -> None:
    assert choose([{0.0: 0.5, 1.0: 0.504}] * 8, current=0.0, margin=0.005, caution=0.0) == 0.0


def test_a_sure_gain_is_the_mean_with_one_window_of_none_less_standard_errors() -> None:
    # Gains 0.3, 0.3 and the 0: mean 0.2, deviation sqrt(0.03) over two degrees of freedom, over three windows.
    assert sure_gain([0.3, 0.3], caution=1.0) == pytest.approx(0.2 - math.sqrt(0.03 / 3))
    assert sure_gain([0.3, 0.3], caution=0.0) == pytest.approx(0.2)
    assert sure_gain([0.3], caution=1.0) == pytest.approx(0.0)
    assert sure_gain([0.0], caution=1.0) == 0.0


@pytest.mark.parametrize("current", [0.0, 1.0])
def test_what_joint_lru_beats_in_the_latest_window_is_never_adopted_or_kept(current: float) -> None:
    windows = [{0.0: 0.5, 1.0: 0.6}] * 5
    assert choose(windows, current, margin=0.001, caution=1.0, reference_score=0.601) == 0.0
    assert choose(windows, current, margin=0.001, caution=1.0, reference_score=0.6) == 1.0


def test_another_value_takes_the_place_of_one_that_fell_behind_joint_lru() -> None:
    windows = [{0.0: 0.5, 1.0: 0.6, 2.0: 0.61}] * 5
    assert choose(windows, 1.0, margin=0.02, caution=1.0, reference_score=0.605) == 2.0
    assert choose(windows, 1.0, margin=0.02, caution=1.0) == 1.0


def test_recency_alone_stays_where_it_is_itself_below_joint_lru() -> None:
    assert choose([{0.0: 0.5, 1.0: 0.49}] * 5, 0.0, margin=0.001, caution=1.0, reference_score=0.7) == 0.0


def test_a_reference_below_recency_alone_does_not_lower_the_bar() -> None:
    windows = [*[{0.0: 0.5, 1.0: 0.8}] * 5, {0.0: 0.5, 1.0: 0.499}]
    assert choose(windows, 1.0, margin=0.001, caution=1.0, reference_score=0.1) == 0.0
