"""Age bins: doubling, without gaps, and a place between their middles."""

import numpy as np
import pytest

from marconi.policy.eviction.best import log2_worth
from marconi.policy.forecast.hazard import NUM_BINS, bin_of, bin_starts_s, bin_widths_s


def test_bins_double_and_join_without_a_gap() -> None:
    starts, widths = bin_starts_s(), bin_widths_s()
    assert len(starts) == len(widths) == NUM_BINS
    assert starts[:5].tolist() == [0, 1, 2, 4, 8]
    assert (starts[:-1] + widths[:-1] == starts[1:]).all()
    assert starts[-1] == widths[-1] == 2.0**18, "the last is given the width that doubling would give it"


@pytest.mark.parametrize(
    ("age_s", "index"),
    [(0.0, 0), (0.3, 0), (0.999, 0), (1.0, 1), (1.999, 1), (2.0, 2), (3.9, 2), (4.0, 3), (2.0**18, 19), (1e9, 19)],
)
def test_an_age_is_in_the_bin_that_begins_at_it_or_last_before_it(age_s: float, index: int) -> None:
    assert bin_of(np.array([age_s])).tolist() == [index]


def test_the_bin_of_an_age_is_the_one_whose_bounds_hold_it() -> None:
    ages_s = np.random.default_rng(1).uniform(0, 5000, 2000)
    starts, widths = bin_starts_s(), bin_widths_s()
    bins = bin_of(ages_s)
    assert (starts[bins] <= ages_s).all()
    assert (ages_s < starts[bins] + widths[bins]).all()


def place_of(age_s: float) -> float:
    """Where an age is read from the index: there the index is the number of the bin."""
    return log2_worth(range(NUM_BINS), 0, age_s)


def test_an_age_is_read_at_the_bins_number_at_its_middle_and_further_on_the_older_it_is() -> None:
    middles_s = 2.0 ** (np.arange(NUM_BINS) - 0.5)
    assert [place_of(age_s) for age_s in middles_s] == pytest.approx(list(range(NUM_BINS)))
    assert [place_of(age_s) for age_s in (0.0, 0.1, 1e12)] == [0, 0, NUM_BINS - 1]
    assert (np.diff([place_of(age_s) for age_s in np.linspace(0.8, 9000, 5000)]) > 0).all()
