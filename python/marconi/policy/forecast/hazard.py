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
factors, in closed form each. Lives that ended in one bin went through all bins before it, so a sum for each bin and one
running sum over bins say what each life spent where: O(lives + bins).

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

from collections.abc import Iterator
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


class Observations(NamedTuple):
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

    def fit(self, seen: Observations) -> Iterator[None]:
        """Estimate everything from what was seen, the factors from where they stood before, a step at a time.

        Only the first step reads the strata and uses of `seen`. The multipliers change in
        the last, and the baseline is a whole fit's after it.
        """
        strata, levels, used, ages_s = seen
        if not len(strata):
            return
        num_cells, uses, bins = self.baseline.size, np.flatnonzero(used), bin_of(ages_s)
        groups, cells, last_s = self._groups[strata], strata * NUM_BINS + bins, ages_s - bin_starts_s()[bins]
        events = np.bincount(cells[uses], minlength=num_cells).reshape(self.baseline.shape).astype(float)
        yield
        cells_of = [groups * num + levels[:, factor] for factor, num in enumerate(self.shape.num_levels)]
        uses_of, product = [], np.ones(len(cells))
        for cell, weights in zip(cells_of, self.weights, strict=True):
            uses_of.append(np.bincount(cell[uses], minlength=weights.size))
            product *= weights.ravel()[cell]
        for _ in range(NUM_ROUNDS):
            yield
            lived = np.bincount(cells, product, num_cells).astype(float).reshape(events.shape)
            lived_last_s = np.bincount(cells, product * last_s, num_cells).astype(float).reshape(events.shape)
            self._fit_baseline(events, lived, lived_last_s)
            before = np.cumsum(self.baseline * bin_widths_s(), axis=1) - self.baseline * bin_widths_s()
            expected = before.ravel()[cells] + last_s * self.baseline.ravel()[cells]
            for factor, (cell, num_used) in enumerate(zip(cells_of, uses_of, strict=True)):
                old = self.weights[factor].ravel()
                num_expected = np.bincount(cell, product * expected, old.size) / old
                new = (num_used + LEVEL_EVENTS) / (num_expected + LEVEL_EVENTS)
                product *= (new / old)[cell]
                self.weights[factor] = new.reshape(-1, self.shape.num_levels[factor])
        self.multipliers = [rounded(weights).tolist() for weights in self.weights]

    def _fit_baseline(self, events: Floats, lived: Floats, last_s: Floats) -> None:
        """Estimate the baseline, from what ended in each cell: the weight of lives, and their seconds in that bin."""
        beyond = np.cumsum(lived[:, ::-1], axis=1)[:, ::-1] - lived
        exposed_s = last_s + beyond * bin_widths_s()
        members = np.arange(len(self._prior))[:, None] == self._groups
        group = (members @ events + GROUP_EVENTS) / (members @ exposed_s + GROUP_EVENTS / self._prior)
        self.baseline = (events + STRATUM_EVENTS) / (exposed_s + STRATUM_EVENTS / group[self._groups])


def waiting_index(hazard: Floats) -> Floats:
    """The index in uses per second at the start of each bin, [stratum, bin], from rates of the same shape."""
    used = -np.expm1(-hazard * bin_widths_s())
    held_s = used / np.maximum(hazard, 1e-30)
    index, unused = np.zeros_like(hazard), np.ones_like(hazard)
    num_used, num_held_s = np.zeros_like(hazard), np.zeros_like(hazard)
    for ahead in range(NUM_BINS):
        firsts, lasts = np.s_[:, : NUM_BINS - ahead], np.s_[:, ahead:]
        num_used[firsts] += unused[firsts] * used[lasts]
        num_held_s[firsts] += unused[firsts] * held_s[lasts]
        unused[firsts] *= 1.0 - used[lasts]
        np.maximum(index[firsts], num_used[firsts] / num_held_s[firsts], out=index[firsts])
    rising = np.maximum.accumulate(index, axis=1)
    falling = np.maximum.accumulate(index[:, ::-1], axis=1)[:, ::-1]
    # Where one of the two has not reached the highest value yet, or no longer has it, it is the lower one.
    envelope: Floats = np.minimum(rising, falling)
    return envelope
