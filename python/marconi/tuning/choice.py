"""Which value to adopt, from the gains over recency alone that the latest windows showed.

Two things are called LRU here, and every window scores both:

    value 0         the tuned rule by recency alone: leaves and single-child nodes, by each node's own last hit
    the reference   LRU as the field means it (SGLang+: leaves, a hit refreshes the whole path), another rule

The objective is nearly flat and differs from window to window: the best value of one window is mostly luck, and on the
next it may be far worse than LRU, for a benefit does not age. So a value is worth its *sure gain*:

    gain(v, w)   = score of v - score of 0, in window w
    sure gain(v) = mean of gain - `caution` standard errors of that mean

over the last windows, with one more window without any gain counted in: what one window shows is not believed.

1. The value of the greatest sure gain is adopted if that reaches `margin`, and 0 if none does; among those within
   half a margin of the greatest the lowest value, which is nearest to recency alone.
2. A value other than 0 is never adopted or kept when the latest window says that it is worse than 0 or worse than the
   reference.
3. A value that still has a sure gain is left only for one that is better by `margin`: a flat objective changes nothing.

0 is what remains when no other value passes, even where it is itself below the reference: the live rule has a
parameter to change and cannot become another rule. Its gains are measured against 0 for the same reason.
"""

import math
from collections.abc import Mapping, Sequence

LRU = 0.0
"""The value at which a tuned rule goes by recency alone: LRU of each node's own last hit."""


def choose(
    windows: Sequence[Mapping[float, float]],
    current: float,
    margin: float,
    caution: float,
    reference_score: float | None = None,
) -> float:
    """The value to go on with, from the scores by value of each window, latest last; all have `LRU` and `current`.

    `reference_score` is that of the reference rule in the latest window; without it, 0 alone is the bar.
    """
    latest = windows[-1]
    bar = latest[LRU] if reference_score is None else max(latest[LRU], reference_score)
    sure = {
        value: sure_gain([scores[value] - scores[LRU] for scores in windows], caution)
        for value, score in latest.items()
        if value != LRU and score >= bar
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
