"""Proportional hazards: known rates come out of simulated waits, and the fit is that of plain loops."""

import math

import numpy as np
import pytest

from marconi.policy.forecast.forecast import Lives
from marconi.policy.forecast.hazard import (
    NUM_BINS,
    Floats,
    HazardModel,
    Observations,
    Shape,
    bin_starts_s,
    bin_widths_s,
)

from .naive_forecast import Estimate, Life

ONE = Shape(group_of=(0,), group_priors=(0.3,), num_levels=())
NOW_S = 1e9


def simulated_waits(rng: np.random.Generator, hazard: Floats, weight: float, num: int) -> Floats:
    """Times to the next use under `weight` times a step function of age."""
    edges = np.concatenate([[0.0], np.cumsum(weight * hazard * bin_widths_s())])
    ends_s = np.concatenate([bin_starts_s(), [2.0**19]])
    return np.interp(rng.exponential(size=num), edges, ends_s)


def live(lives: Lives, stratum: int, levels: tuple[int, ...], waits_s: Floats, limits_s: Floats) -> None:
    """A life for each wait, cut off at its limit."""
    for wait_s, limit_s in zip(waits_s.tolist(), limits_s.tolist(), strict=True):
        lives.begin(0, stratum, levels, 0.0)
        lives.end(0, min(wait_s, limit_s), used=wait_s <= limit_s)


def fit(model: HazardModel, seen: Observations) -> None:
    """Every step of a fit."""
    for _ in model.fit(seen):
        pass


def weight_in(model: HazardModel, stratum: int, levels: tuple[int, ...]) -> float:
    """The product of the factors."""
    group = model.shape.group_of[stratum]
    return math.prod(by_level[group][level] for by_level, level in zip(model.multipliers, levels, strict=True))


def test_before_anything_is_seen_rates_fall_as_the_prior() -> None:
    model = HazardModel(Shape(group_of=(0, 1, 1), group_priors=(0.3, 0.6), num_levels=(2,)))
    assert model.baseline[0, :3] == pytest.approx([0.3 / 8.5, 0.3 / 9.5, 0.3 / 11])
    assert (model.baseline[1] == model.baseline[2]).all()
    assert model.baseline[1] == pytest.approx(2 * model.baseline[0])
    assert weight_in(model, 0, (1,)) == 1.0
    before = model.baseline.copy()
    fit(model, Lives(4, 1).seen(10.0))
    assert (model.baseline == before).all(), "no life says nothing"


def test_known_rates_are_recovered_from_waits_that_were_cut_off() -> None:
    rng = np.random.default_rng(5)
    shape = Shape(group_of=(0, 1), group_priors=(0.3, 0.03), num_levels=())
    constant = np.full(NUM_BINS, 0.02)
    falling = np.where(bin_starts_s() < 8, 0.1, 0.005)
    lives = Lives(8000, 0)
    num_events = {}
    for stratum, hazard in enumerate((constant, falling)):
        waits_s, limits_s = simulated_waits(rng, hazard, 1.0, 4000), rng.exponential(60.0, 4000)
        live(lives, stratum, (), waits_s, limits_s)
        seen_s = waits_s[waits_s <= limits_s]
        num_events[stratum] = np.histogram(seen_s, np.concatenate([bin_starts_s(), [1e12]]))[0]
        assert len(seen_s) < 3600, "many were cut off"
    model = HazardModel(shape)
    fit(model, lives.seen(NOW_S))
    num_checked = 0
    for stratum, hazard in enumerate((constant, falling)):
        for index in np.flatnonzero(num_events[stratum] >= 60):
            error = abs(model.baseline[stratum, index] / hazard[index] - 1)
            assert error < 4 / math.sqrt(num_events[stratum][index]), f"stratum {stratum}, bin {index}"
            num_checked += 1
    assert num_checked >= 10


def test_a_wait_that_goes_on_counts_as_unused_so_far() -> None:
    lives = Lives(1000, 0)
    for serial in range(1000):
        lives.begin(serial, 0, (), 0.0)
        if serial < 100:
            lives.end(serial, 0.5, used=True)
    model = HazardModel(ONE)
    fit(model, lives.seen(1.0))
    assert model.baseline[0, 0] == pytest.approx(100 / (100 * 0.5 + 900), rel=0.05)


def test_one_life_is_drawn_to_the_prior_by_pseudo_events() -> None:
    lives = Lives(4, 0)
    lives.begin(1, 0, (), 0.0)
    lives.end(1, 0.5, used=True)
    model = HazardModel(ONE)
    fit(model, lives.seen(NOW_S))
    prior = 0.3 / 8.5
    group = (1 + 1) / (0.5 + 1 / prior)
    assert model.baseline[0, 0] == pytest.approx((1 + 6) / (0.5 + 6 / group))
    assert prior < model.baseline[0, 0] < 3 * prior, "a single life says 2 a second"
    assert model.baseline[0, 5] == pytest.approx(0.3 / 32)


def test_a_stratum_without_lives_takes_after_its_group() -> None:
    lives = Lives(4000, 0)
    for number in range(4000):
        lives.begin(number, 0, (), 0.0)
        lives.end(number, 0.25, used=True)
    model = HazardModel(Shape(group_of=(0, 0, 1), group_priors=(0.3, 0.3), num_levels=()))
    fit(model, lives.seen(NOW_S))
    assert model.baseline[1, 0] == pytest.approx(4.0, rel=0.1)
    assert model.baseline[2, 0] == pytest.approx(0.3 / 8.5), "another group learns nothing from it"


def test_multipliers_are_recovered_for_each_group() -> None:
    rng = np.random.default_rng(6)
    multipliers = {0: (0.25, 1.0, 4.0), 1: (3.0, 1.0, 1.0)}
    num = 1500
    lives = Lives(6 * num, 1)
    for group, of_level in multipliers.items():
        for level, weight in enumerate(of_level):
            waits_s = simulated_waits(rng, np.full(NUM_BINS, 0.02), weight, num)
            live(lives, group, (level,), waits_s, np.full(num, 300.0))
    model = HazardModel(Shape(group_of=(0, 1), group_priors=(0.3, 0.3), num_levels=(3,)))
    for _ in range(5):
        fit(model, lives.seen(NOW_S))
    slack = 4 * math.sqrt(2 / num)
    for group, of_level in multipliers.items():
        ratios = model.weights[0][group] / model.weights[0][group, 1]
        assert ratios == pytest.approx(of_level, rel=slack), f"group {group}"


def test_a_level_of_which_nothing_is_known_multiplies_by_one() -> None:
    lives = Lives(100, 1)
    live(lives, 0, (0,), np.full(100, 3.0), np.full(100, 10.0))
    model = HazardModel(Shape(group_of=(0,), group_priors=(0.3,), num_levels=(2,)))
    fit(model, lives.seen(NOW_S))
    assert model.weights[0][0, 1] == 1.0
    assert weight_in(model, 0, (1,)) == 1.0


def test_the_weight_is_the_product_of_the_factors_of_the_strata_s_group() -> None:
    rng = np.random.default_rng(7)
    shape = Shape(group_of=(0, 1), group_priors=(0.3, 0.3), num_levels=(2, 3))
    lives = Lives(400, 2)
    for _ in range(400):
        levels = (int(rng.integers(2)), int(rng.integers(3)))
        live(lives, int(rng.integers(2)), levels, rng.exponential(9, 1), rng.exponential(9, 1))
    model = HazardModel(shape)
    fit(model, lives.seen(NOW_S))
    for stratum in (0, 1):
        expected = model.weights[0][stratum, 1] * model.weights[1][stratum, 2]
        assert weight_in(model, stratum, (1, 2)) == pytest.approx(expected, abs=2**-20)
    assert weight_in(model, 0, (1, 2)) != weight_in(model, 1, (1, 2))


@pytest.mark.parametrize("seed", range(3))
def test_the_fit_is_that_of_plain_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = Shape(group_of=(0, 0, 1, 2), group_priors=(0.3, 0.05, 0.6), num_levels=(3, 2))
    lives, listed = Lives(500, 2), []
    naive = Estimate.prior(shape)
    model = HazardModel(shape)
    assert model.baseline == pytest.approx(np.array(naive.baseline), rel=1e-12)
    for time in range(3):
        for serial in range(100 * time, 100 * time + 100):
            life = Life(int(rng.integers(4)), (int(rng.integers(3)), int(rng.integers(2))), 1000.0 * time)
            listed.append(life)
            lives.begin(serial, life.stratum, life.levels, life.began_s)
            if rng.random() < 0.7:
                life.ended_s = life.began_s + float(np.exp(rng.uniform(-8, 14)))
                life.used = bool(rng.random() < 0.6)
                lives.end(serial, life.ended_s, used=life.used)
        now_s = 2e6 + time
        fit(model, lives.seen(now_s))
        naive = naive.fitted(shape, listed, now_s)
        assert model.baseline == pytest.approx(np.array(naive.baseline), rel=1e-9)
        for factor in range(2):
            assert model.weights[factor] == pytest.approx(np.array(naive.weights[factor]), rel=1e-9)
