"""From rates of use to the worth of waiting: the Gittins index of a state of a given age.

    g(a) = max over T of P(used within T | unused at a) / E[time held until used or T | unused at a]

is the best rate of uses per second that holding the state for a well-chosen time can give. Where the rate only falls
with age it is the rate itself; where a use is due later (people take a while to answer) it looks ahead. An index that
rose with age would have a state go just before its use is due, in favour of one that is due after it, so the index at
an age is taken as the largest at that age or beyond; it then falls with age, and among equals the oldest goes first.
"""

import numpy as np

from marconi.policy.forecast.ages import NUM_BINS, Floats, bin_widths_s


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
    falling: Floats = np.maximum.accumulate(index[:, ::-1], axis=1)[:, ::-1]
    return falling
