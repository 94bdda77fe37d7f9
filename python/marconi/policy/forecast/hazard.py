"""Proportional hazards: at what rate a state that has waited this long is used next.

    rate(age, s, x) = h[s, bin(age)] * product over factors j of w[j][group(s), x_j]

in uses per second. h is a step function of age for each stratum s; w multiplies it by what is known of the state, in
levels x_j of each factor, separately for each group of strata. Ages are censored where a life goes on or was cut off,
which the likelihood takes as it is: events over exposure. (Cox's model with a piecewise exponential baseline.)

Few lives must not say much, so every estimate is drawn to the next broader one by pseudo-events: a group's baseline to
a prior that falls as 1 / (age + 8 s), a stratum's to its group's, a factor's level to 1. A fit alternates baseline and
factors, in closed form each: O(lives * bins).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from marconi.policy.forecast.ages import NUM_BINS, Floats, Ints, bin_of, bin_starts_s, bin_widths_s
from marconi.policy.forecast.lives import Lives

PRIOR_ONSET_S: Final = 8.0
"""Where the prior baseline begins to fall."""
GROUP_EVENTS: Final = 1.0
STRATUM_EVENTS: Final = 6.0
LEVEL_EVENTS: Final = 12.0
"""Pseudo-events: what an estimate weighs against the broader one."""
NUM_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Strata, their groups, and the factors' numbers of levels."""

    group_of: tuple[int, ...]
    """The group of each stratum, groups numbered from 0."""
    group_priors: tuple[float, ...]
    """Uses per second times (age + 8 s) that are assumed of each group before any is seen."""
    num_levels: tuple[int, ...]
    """Of each factor."""


class HazardModel:
    """Rates of use; the prior until `fit`."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        middles_s = bin_starts_s() + 0.5 * bin_widths_s()
        self._prior = np.array([[prior] for prior in shape.group_priors]) / (middles_s + PRIOR_ONSET_S)
        self._groups = np.array(shape.group_of)
        self.baseline: Floats = self._prior[self._groups]
        """Uses per second, [stratum, bin]."""
        self.weights: list[Floats] = [np.ones((len(shape.group_priors), num)) for num in shape.num_levels]
        """Multipliers, [group, level] of each factor."""
        self._multipliers = [weights.tolist() for weights in self.weights]
        self._products: dict[tuple[int, tuple[int, ...]], float] = {}
        """By stratum and levels, those that were asked for since the last fit."""

    def weight(self, stratum: int, levels: tuple[int, ...]) -> float:
        """The product of the factors."""
        product = self._products.get((stratum, levels))
        if product is None:
            group = self.shape.group_of[stratum]
            product = 1.0
            for multipliers, level in zip(self._multipliers, levels, strict=True):
                product *= multipliers[group][level]
            self._products[stratum, levels] = product
        return product

    def fit(self, lives: Lives, now_s: float) -> None:
        """Estimate everything from what was seen up to `now_s`, the factors from where they stood before."""
        strata, levels, used = lives.seen()
        if not len(strata):
            return
        ages_s = lives.ages_s(now_s)
        exposure_s = np.clip(ages_s[:, None] - bin_starts_s(), 0.0, bin_widths_s())
        exposure_s[:, -1] = np.maximum(ages_s - bin_starts_s()[-1], 0.0)
        num_strata = len(self._groups)
        cells = strata[used] * NUM_BINS + bin_of(ages_s[used])
        events = np.bincount(cells, minlength=num_strata * NUM_BINS).reshape(num_strata, NUM_BINS).astype(float)
        groups = self._groups[strata]
        product = self._product(groups, levels)
        for _ in range(NUM_ROUNDS):
            self._fit_baseline(strata, events, product[:, None] * exposure_s)
            expected = (exposure_s * self.baseline[strata]).sum(axis=1)
            for factor, weights in enumerate(self.weights):
                cell = groups * weights.shape[1] + levels[:, factor]
                old = weights.ravel()
                num_expected = np.bincount(cell, product * expected, old.size) / old
                num_used = np.bincount(cell[used], minlength=old.size)
                new = (num_used + LEVEL_EVENTS) / (num_expected + LEVEL_EVENTS)
                product *= (new / old)[cell]
                self.weights[factor] = new.reshape(weights.shape)
        self._multipliers = [weights.tolist() for weights in self.weights]
        self._products.clear()

    def _product(self, groups: Ints, levels: Ints) -> Floats:
        product = np.ones(len(groups))
        for factor, weights in enumerate(self.weights):
            product *= weights[groups, levels[:, factor]]
        return product

    def _fit_baseline(self, strata: Ints, events: Floats, exposure_s: Floats) -> None:
        exposed_s = np.stack([exposure_s[strata == stratum].sum(axis=0) for stratum in range(len(events))])
        members = np.arange(len(self._prior))[:, None] == self._groups
        group = (members @ events + GROUP_EVENTS) / (members @ exposed_s + GROUP_EVENTS / self._prior)
        self.baseline = (events + STRATUM_EVENTS) / (exposed_s + STRATUM_EVENTS / group[self._groups])
