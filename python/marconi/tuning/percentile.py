"""Percentiles by nearest rank: the least of the values that so many percent of them do not exceed.

One definition for what is tuned, reported and drawn. A value is never interpolated, so each is one that was seen.
"""

from collections.abc import Sequence


def nearest_rank(rising: Sequence[float], percent: int) -> float:
    """The percentile of at least one value, in rising order; `percent` is from 1 to 100."""
    return rising[-(-percent * len(rising) // 100) - 1]
