"""From rates of use to the worth of waiting: the Gittins index of a state of a given age.

    g(a) = max over T of P(used within T | unused at a) / E[time held until used or T | unused at a]

is the best rate of uses per second that holding the state for a well-chosen time can give. Where the rate only falls
with age it is the rate itself. Where a use is due later (people take a while to answer) it looks ahead, and rises until
the use is due: a state that has waited for most of a pause is worth more than a new one like it. So where more states
wait for their use than there is room for, some are kept until then and not all of them for a part of it; a loop over
more than fits, of which a rule by recency keeps nothing that it needs, is hit as far as memory goes.

An index of few uses is ragged. It is taken to rise up to its highest and to fall from there: before, it is the largest
at an age or younger, after that the largest at an age or older. Of states alike the oldest or the youngest then goes
first, none in between.
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
    rising = np.maximum.accumulate(index, axis=1)
    falling = np.maximum.accumulate(index[:, ::-1], axis=1)[:, ::-1]
    # Where one of the two has not reached the highest value yet, or no longer has it, it is the lower one.
    envelope: Floats = np.minimum(rising, falling)
    return envelope
