"""The index against its definition."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from marconi.policy.forecast.hazard import NUM_BINS, bin_starts_s, bin_widths_s, waiting_index

STEPS_A_BIN = 40


def best_rate(hazard: Sequence[float], first: int) -> float:
    """The largest P(used within T) / E[time held] over many T, from the start of bin `first`, step by step."""
    best, used, held_s = 0.0, 0.0, 0.0
    for index in range(first, NUM_BINS):
        step_s = float(bin_widths_s()[index]) / STEPS_A_BIN
        for _ in range(STEPS_A_BIN):
            unused = 1.0 - used
            within = unused * -math.expm1(-hazard[index] * step_s)
            used += within
            held_s += within / hazard[index]
            best = max(best, used / held_s)
    return best


def by_definition(hazard: Sequence[float]) -> list[float]:
    """The best rate, up to its highest the largest so far, from there on the largest yet to come."""
    rates = [best_rate(hazard, first) for first in range(NUM_BINS)]
    peak = rates.index(max(rates))
    return [max(rates[: bin_ + 1]) if bin_ <= peak else max(rates[bin_:]) for bin_ in range(NUM_BINS)]


@pytest.mark.parametrize("seed", range(5))
def test_the_index_is_the_best_rate_over_all_times_to_wait(seed: int) -> None:
    hazard = np.exp(np.random.default_rng(seed).normal(-5, 2, (3, NUM_BINS)))
    index = waiting_index(hazard)
    for stratum in range(3):
        assert index[stratum] == pytest.approx(by_definition(hazard[stratum].tolist()), rel=1e-9)


def test_of_a_constant_rate_the_index_is_the_rate() -> None:
    hazard = np.array([[1e-7] * NUM_BINS, [0.01] * NUM_BINS, [3.0] * NUM_BINS])
    assert waiting_index(hazard) == pytest.approx(hazard, rel=1e-9)


def test_of_a_falling_rate_the_index_is_the_rate() -> None:
    hazard = (0.3 / (bin_starts_s() + 8))[None, :]
    assert waiting_index(hazard) == pytest.approx(hazard, rel=1e-12)


def test_the_index_looks_ahead_to_a_use_that_is_due_later() -> None:
    hazard = np.full((1, NUM_BINS), 1e-4)
    hazard[0, 7] = 0.05  # from 64 to 128 s, used almost surely
    index = waiting_index(hazard)[0]
    used = -math.expm1(-0.05 * 64)
    early = -math.expm1(-1e-4 * 64)
    survivors = math.exp(-1e-4 * 64)
    waited = (early + survivors * used) / (early / 1e-4 + survivors * used / 0.05)
    assert waited == pytest.approx(best_rate(hazard[0].tolist(), 0), rel=1e-9)
    assert waited > 50 * 1e-4
    assert index[0] == pytest.approx(waited)
    assert (np.diff(index[:8]) > 0).all(), "worth more, the less there is left to wait"
    assert index[7] == pytest.approx(0.05)
    assert index[8:] == pytest.approx(1e-4)


def test_the_index_has_one_peak() -> None:
    hazard = np.exp(np.random.default_rng(9).normal(-4, 3, (50, NUM_BINS)))
    for index in waiting_index(hazard):
        peak = int(index.argmax())
        assert (np.diff(index[: peak + 1]) >= 0).all()
        assert (np.diff(index[peak:]) <= 0).all()


def test_the_index_is_at_least_the_rate_and_at_most_the_highest_one_to_come() -> None:
    hazard = np.exp(np.random.default_rng(8).normal(-4, 3, (50, NUM_BINS)))
    index = waiting_index(hazard)
    highest = np.maximum.accumulate(hazard[:, ::-1], axis=1)[:, ::-1]
    assert (index >= hazard * (1 - 1e-12)).all()
    assert (index <= highest * (1 + 1e-12)).all()
