"""Ages: seconds since a state was made or last used, in bins that double in width.

Bin 0 is the first second, bin b >= 1 is from 2**(b - 1) to 2**b seconds; the last has no end, and is given the width
that doubling would give it.
"""

import math
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

NUM_BINS: Final = 20
"""The last bin begins at 2**18 s, three days."""


def bin_starts_s() -> Floats:
    """Where each bin begins."""
    return np.concatenate([[0.0], np.exp2(np.arange(NUM_BINS - 1))])


def bin_widths_s() -> Floats:
    """Seconds in each bin."""
    return np.concatenate([[1.0], np.exp2(np.arange(NUM_BINS - 1))])


def bin_of(ages_s: Floats) -> Ints:
    """The bin of each age."""
    bins = np.floor(np.log2(np.maximum(ages_s, 0.5))) + 1
    clipped: Ints = np.clip(bins, 0, NUM_BINS - 1).astype(np.int64)
    return clipped


def place_of(age_s: float) -> float:
    """Where an age lies among the bins' middles, in the logarithm: b for the middle of bin b, in 0 .. NUM_BINS - 1."""
    return min(max(math.log2(max(age_s, 0.5)) + 0.5, 0.0), NUM_BINS - 1.0)
