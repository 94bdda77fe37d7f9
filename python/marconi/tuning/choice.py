"""Which value to adopt, from the gains over LRU that the latest windows showed.

The objective is nearly flat and differs from window to window: the best value of one window is mostly luck, and on the
next it may be far worse than LRU, for a benefit does not age. So a value is worth its *sure gain*:

    gain(v, w)   = score of v - score of 0, which is LRU, in window w
    sure gain(v) = mean of gain - `caution` standard errors of that mean

over the last windows, with one more window without any gain counted in: what one window shows is not believed.

1. The value of the greatest sure gain is adopted if that reaches `margin`, and LRU if none does; among those within
   half a margin of the greatest the lowest value, which is nearest to LRU.
2. A value is never adopted or kept when the latest window says that it is worse than LRU.
3. A value that still has a sure gain is left only for one that is better by `margin`: a flat objective changes nothing.
"""

import math
from collections.abc import Mapping, Sequence

LRU = 0.0
"""The value at which a tuned rule is LRU."""


def choose(windows: Sequence[Mapping[float, float]], current: float, margin: float, caution: float) -> float:
    """The value to go on with, from the scores by value of each window, latest last; all have `LRU` and `current`."""
    latest = windows[-1]
    sure = {
        value: sure_gain([scores[value] - scores[LRU] for scores in windows], caution)
        for value, score in latest.items()
        if value != LRU and score >= latest[LRU]
    }
    best = max(sure.values(), default=0.0)
    kept = sure.get(current, -math.inf)
    if kept > 0 and best < kept + margin:
        return current
    if best <= 0 or best < margin:
        return LRU
    return min(value for value, gain in sure.items() if gain >= best - margin / 2)


def sure_gain(gains: Sequence[float], caution: float) -> float:
    """The mean of `gains` and one of 0, less `caution` standard errors; `gains` has at least one."""
    num = len(gains) + 1
    mean = sum(gains) / num
    variance = (sum((gain - mean) ** 2 for gain in gains) + mean**2) / (num - 1)
    return mean - caution * math.sqrt(variance / num)
