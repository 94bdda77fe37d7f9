"""Hints: positions of a prompt, by number or by its end, and one line for anything else."""

import pytest

from marconi.policy.admission.hints import MAX_HINTS, Hints, hints_of


def test_positions_rise_without_repetition_and_minus_one_is_the_end() -> None:
    assert hints_of([1200, -1, 7, 1200], 1640) == Hints((7, 1200, 1640))
    assert hints_of([1640, -1], 1640) == Hints((1640,))
    assert hints_of((3,), 3) == Hints((3,))
    assert hints_of([], 10) == Hints(())


def test_beyond_the_limit_the_shallowest_are_kept_and_the_others_counted() -> None:
    assert hints_of([60, -1, 50, 10, 40, 30, 20, 10], 60) == Hints((10, 20, 30, 40), (50, 60))
    assert hints_of([*range(1, MAX_HINTS + 1)], 9).over_limit == ()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("12", "'12'"),
        (12, "12"),
        (None, "None"),
        ({"at": 12}, "{'at': 12}"),
        ([12.0], "12.0 at 0"),
        ([3, "12"], "'12' at 1"),
        ([3, None], "None at 1"),
        ([True], "True at 0"),
        ([[3]], "[3] at 0"),
        ([0], "0 at 0"),
        ([-2], "-2 at 0"),
        ([5, 51], "51 at 1"),
        ([10**40], "1000000000000000000000000000000000000000... at 0"),
        ("x" * 1000, f"'{'x' * 39}..."),
    ],
)
def test_what_is_no_list_of_positions_is_named_beside_what_is_expected(value: object, says: str) -> None:
    with pytest.raises(ValueError, match="must be") as refused:
        hints_of(value, 50)
    line = str(refused.value)
    assert line == f"must be a list of integers from 1 to 50, the prompt's length, or -1 for its end, got {says}"
