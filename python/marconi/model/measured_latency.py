"""Time to first token from a table of measurements.

A table is CSV with a header line, or a JSON list of objects, with one of two sets of columns:

    uncached_tokens,seconds                    what a prefill of so many tokens took, whatever was cached before them
    cached_tokens,prompt_tokens,seconds        what a prompt took of which so much was cached

Points of equal `cached_tokens` make a curve over the uncached tokens. Between points, and between curves, seconds are
interpolated linearly; below a curve's first point they are constant (a short prefill is bound by memory), above its
last they follow its last segment; below the first and above the last curve, that curve holds. Seconds must not fall
along a curve: a table in which more work takes less time is one of noise.
"""

import csv
import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from marconi.model.latency import LatencyModel, require_lengths


@dataclass(frozen=True, slots=True)
class _Curve:
    cached: int
    uncached: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, uncached: float) -> float:
        last = len(self.uncached) - 1
        right = min(max(bisect_right(self.uncached, uncached), 1), last)
        x0, x1 = self.uncached[right - 1], self.uncached[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(y0 + (y1 - y0) * (uncached - x0) / (x1 - x0), self.seconds[0])

    def at_each(self, uncached: NDArray[np.float64]) -> NDArray[np.float64]:
        x, y = np.array(self.uncached), np.array(self.seconds)
        right = np.clip(np.searchsorted(x, uncached, side="right"), 1, len(x) - 1)
        slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
        seconds: NDArray[np.float64] = np.maximum(y[right - 1] + slope * (uncached - x[right - 1]), y[0])
        return seconds


class MeasuredLatency(LatencyModel):
    """Interpolates between measured points.

    `points` are (cached tokens, prompt tokens, seconds). `ValueError` for fewer than two points on a curve, impossible
    lengths, seconds that are not positive and finite, two points at one place, and seconds that fall along a curve.
    """

    __slots__ = ("_cached", "_curves", "source")

    def __init__(self, points: Iterable[tuple[int, int, float]], *, source: str = "table") -> None:
        self.source = source
        by_cached: dict[int, dict[int, float]] = {}
        for cached, prompt, seconds in points:
            self._require(0 <= cached < prompt, f"cached tokens must be fewer than the prompt's {prompt}, got {cached}")
            is_time = math.isfinite(seconds) and seconds > 0
            self._require(is_time, f"seconds at {cached} of {prompt} tokens must be more than 0, got {seconds}")
            curve = by_cached.setdefault(cached, {})
            self._require(prompt - cached not in curve, f"two points at {cached} cached of {prompt} tokens")
            curve[prompt - cached] = seconds
        self._require(bool(by_cached), "no points")
        self._curves = tuple(self._curve(cached, by_cached[cached]) for cached in sorted(by_cached))
        self._cached = tuple(curve.cached for curve in self._curves)

    @classmethod
    def read(cls, path: Path) -> "MeasuredLatency":
        """The table in the file `path`, CSV or, if its name ends in `.json`, JSON; `ValueError` if it is a bad one."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from None
        rows = _json_rows(text, path) if path.suffix == ".json" else list(csv.DictReader(text.splitlines()))
        return cls([_point(row, f"{path}: row {number}") for number, row in enumerate(rows, 1)], source=str(path))

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        """Time to first token, interpolated."""
        cached = require_lengths(num_cached_tokens, num_prompt_tokens)
        uncached = num_prompt_tokens - cached
        above = bisect_right(self._cached, cached)
        if above == 0 or above == len(self._curves):
            return self._curves[max(above - 1, 0)].at(uncached)
        low, high = self._curves[above - 1], self._curves[above]
        share = (cached - low.cached) / (high.cached - low.cached)
        return (1 - share) * low.at(uncached) + share * high.at(uncached)

    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        """Look at every number of cached tokens, since measured curves may cross."""
        require_lengths(0, num_prompt_tokens)
        cached = np.arange(num_prompt_tokens)
        uncached = (num_prompt_tokens - cached).astype(np.float64)
        each = np.array([curve.at_each(uncached) for curve in self._curves])
        high = np.searchsorted(self._cached, cached, side="right")
        low, high = np.clip(high - 1, 0, None), np.clip(high, None, len(self._curves) - 1)
        known = np.array(self._cached, dtype=np.float64)
        gap = known[high] - known[low]
        share = np.divide(cached - known[low], gap, out=np.zeros(len(cached)), where=gap > 0)
        seconds = (1 - share) * each[low, cached] + share * each[high, cached]
        meets = np.flatnonzero(seconds <= budget_s)
        return int(meets[0]) if len(meets) else None

    def _curve(self, cached: int, points: Mapping[int, float]) -> _Curve:
        uncached = sorted(points)
        self._require(len(uncached) >= 2, f"one point at {cached} cached tokens: a curve needs two")
        seconds = [points[num_tokens] for num_tokens in uncached]
        for index in range(1, len(seconds)):
            self._require(
                seconds[index] >= seconds[index - 1],
                f"with {cached} cached, {uncached[index]} tokens must take no less than {uncached[index - 1]} do, got "
                f"{seconds[index]} s and {seconds[index - 1]} s",
            )
        return _Curve(cached, tuple(map(float, uncached)), tuple(seconds))

    def _require(self, condition: bool, problem: str) -> None:
        if not condition:
            raise ValueError(f"{self.source}: {problem}")


def _json_rows(text: str, path: Path) -> list[Mapping[str, Any]]:
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} holds no list of objects")
    return rows


def _point(row: Mapping[str, Any], place: str) -> tuple[int, int, float]:
    try:
        if "uncached_tokens" in row:
            return (0, int(row["uncached_tokens"]), float(row["seconds"]))
        return (int(row["cached_tokens"]), int(row["prompt_tokens"]), float(row["seconds"]))
    except KeyError as error:
        columns = "uncached_tokens,seconds or cached_tokens,prompt_tokens,seconds"
        raise ValueError(f"{place}: columns must be {columns}, got none of {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"{place}: not a number: {error}") from None
