"""The rate at which a state of a given age is used next, and the worth of waiting for that use.

Lives. A *life* of a state begins when it is made, used, or changes its role, and ends with the next use, with a change
of role, or, for a state whose use could not be seen any more, with its eviction; an unfinished life counts as
unused so far. The last lives are kept (`forecast.py`).

Rates. Proportional hazards, from the lives:

    rate(age, s, x) = h[s, bin(age)] * product over factors j of w[j][group(s), x_j]

in uses per second. h is a step function of age for each stratum s; w multiplies it by what is known of the state, in
levels x_j of each factor, separately for each group of strata. Ages are censored where a life is unfinished or was cut
off, which the likelihood takes as it is: events over exposure. (Cox's model with a piecewise exponential baseline.) Few
lives must not say much, so every estimate is drawn to the next broader one by pseudo-events: a group's baseline to a
prior that falls as 1 / (age + 8 s), a stratum's to its group's, a factor's level to 1. A fit alternates baseline and
factors, in closed form each: O(lives * bins).

Waiting. From rates to the worth of waiting, the Gittins index of a state of age a:

    g(a) = max over T of P(used within T | unused at a) / E[time held until used or T | unused at a]

is the best rate of uses per second that holding the state for a well-chosen time can give. Where the rate only falls
with age it is the rate itself. Where a use is due later (people take a while to answer) it looks ahead, and rises until
the use is due: a state that has waited for most of a pause is worth more than a new one like it. So where more states
wait for their use than there is room for, some are kept until then and not all of them for a part of it; a loop over
more than fits, of which a rule by recency keeps nothing that it needs, is hit as far as memory goes. An index of few
uses is ragged. It is taken to rise up to its highest and to fall from there: before, it is the largest at an age or
younger, after that the largest at an age or older. Of states alike the oldest or the youngest is then evicted first,
none in between.

Ages are seconds since a state was made or last used, in bins that double in width. Bin 0 is the first second, bin
b >= 1 is from 2**(b - 1) to 2**b seconds; the last has no end, and is given the width that doubling would give it.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

NUM_BINS: Final = 20
"""The last bin begins at 2**18 s, three days."""


def bin_starts_s() -> Floats:
    """Where each bin begins."""
    return np.concatenate([[0.0], np.ldexp(1.0, np.arange(NUM_BINS - 1))])


def bin_widths_s() -> Floats:
    """Seconds in each bin."""
    return np.concatenate([[1.0], np.ldexp(1.0, np.arange(NUM_BINS - 1))])


def bin_of(ages_s: Floats) -> Ints:
    """The bin of each age."""
    _, bins = np.frexp(np.maximum(ages_s, 0.5))
    clipped: Ints = np.clip(bins, 0, NUM_BINS - 1).astype(np.int64)
    return clipped


def rounded(fitted: Floats) -> Floats:
    """`fitted` to 20 bits behind the point: how sums are ordered, and so their last bits, is a processor's own."""
    steps: Floats = np.round(fitted * 2**20) / 2**20
    return steps


PRIOR_ONSET_S: Final = 8.0
"""Where the prior baseline begins to fall."""
GROUP_EVENTS: Final = 1.0
STRATUM_EVENTS: Final = 6.0
LEVEL_EVENTS: Final = 12.0
"""Pseudo-events: what an estimate weighs against the broader one."""
NUM_ROUNDS: Final = 2


class Seen(NamedTuple):
    """The observations of lives, [life] each."""

    strata: Ints
    levels: Ints
    """[life, factor]."""
    used: npt.NDArray[np.bool_]
    """Whether it ended in a use."""
    ages_s: Floats
    """Seconds that it took, or has taken so far."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Strata, their groups, and the factors' numbers of levels."""

    group_of: tuple[int, ...]
    """The group of each stratum, groups numbered from 0."""
    group_priors: tuple[float, ...]
    """Uses per second times (age + 8 s) that are assumed of each group before any is seen."""
    num_levels: tuple[int, ...]
    """Levels of each factor."""


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
        self.multipliers: list[list[list[float]]] = [rounded(weights).tolist() for weights in self.weights]
        """The weights as they are looked up."""

    def fit(self, seen: Seen) -> None:
        """Estimate everything from what was seen, the factors from where they stood before."""
        strata, levels, used, ages_s = seen
        if not len(strata):
            return
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
        self.multipliers = [rounded(weights).tolist() for weights in self.weights]

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


def waiting_index(hazard: Floats) -> Floats:
    """The index in uses per second at the start of each bin, [stratum, bin], from rates of the same shape."""
    used = -np.expm1(-hazard * bin_widths_s())
    held_s = used / np.maximum(hazard, 1e-30)
    index = np.zeros_like(hazard)
    for first in range(NUM_BINS):
        unused = np.ones(len(hazard))
        num_used, num_held_s = np.zeros(len(hazard)), np.zeros(len(hazard))
        for last in range(first, NUM_BINS):
            num_used += unused * used[:, last]
            num_held_s += unused * held_s[:, last]
            unused *= 1.0 - used[:, last]
            np.maximum(index[:, first], num_used / num_held_s, out=index[:, first])
    rising = np.maximum.accumulate(index, axis=1)
    falling = np.maximum.accumulate(index[:, ::-1], axis=1)[:, ::-1]
    # Where one of the two has not reached the highest value yet, or no longer has it, it is the lower one.
    envelope: Floats = np.minimum(rising, falling)
    return envelope
