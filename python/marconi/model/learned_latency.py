"""Time to first token as a server's own prefills show it: no data sheet, whatever the device and the load.

    seconds = overhead + FLOPs(cached to prompt) x seconds per FLOP

Both are fitted to the latest prefills, robustly, since one that waited for others says little about itself: the slope
is the median of the slopes between a small and a large prefill (every one of the lower half by FLOPs paired with one of
the upper half; Theil-Sen on n/2 pairs), the overhead the median of what is left. Neither is below 0.

Where nothing but whole answers is seen, the end of a prefill is not. Such an answer takes n forward passes, the prefill
one of them, and

    seconds = n x pass + FLOPs(cached to prompt) x seconds per FLOP         overhead = pass

what grows with the prompt is the prefill's, the rest is shared by all passes alike. Both are fitted alternately, in the
same way. It is less exact, and counts only until enough prefills were timed by themselves.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Final

from marconi.model.latency import LatencyModel, require_lengths

MIN_OBSERVED: Final = 8
"""Prefills before which nothing is claimed."""
_NUM_REMEMBERED: Final = 128
_FIT_EVERY: Final = 16
_NUM_TURNS: Final = 4


class LearnedLatency(LatencyModel):
    """Fitted to what was observed; until `MIN_OBSERVED` prefills were, as `prior` has it, or 0 s for everything."""

    __slots__ = ("_flops", "_num_to_fit", "_observed", "_prior", "_unread", "_whole", "overhead_s", "s_per_flop")

    def __init__(self, flops: Callable[[int], float], prior: LatencyModel | None = None) -> None:
        """`flops` returns the FLOPs of a prefill, by its number of tokens."""
        self._prior = prior
        self.overhead_s = 0.0
        self.s_per_flop = 0.0
        self._flops = flops
        self._observed: deque[tuple[float, float]] = deque(maxlen=_NUM_REMEMBERED)
        self._unread: list[tuple[int, int, float]] = []
        """Tokens cached, tokens of the prompt and seconds since the last fit, which is what needs their FLOPs."""
        self._whole: deque[tuple[float, int, float]] = deque(maxlen=_NUM_REMEMBERED)
        """FLOPs, forward passes and seconds of whole answers."""
        self._num_to_fit = MIN_OBSERVED
        """The number of unread prefills at which the next fit is due."""

    @property
    def is_known(self) -> bool:
        """True once enough was observed to tell a long prefill from a short one."""
        return self.s_per_flop > 0

    def follow(self, overhead_s: float, s_per_flop: float) -> None:
        """Use coefficients that another instance fitted to its own observations."""
        self.overhead_s, self.s_per_flop = overhead_s, s_per_flop

    def observe(self, num_cached_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """Note that a prefill took `seconds`. A call takes a microsecond, and one that fits some 100."""
        unread = self._unread
        unread.append((num_cached_tokens, num_prompt_tokens, seconds))
        if len(unread) >= self._num_to_fit:
            flops = self._flops
            self._observed.extend((flops(prompt) - flops(cached), taken_s) for cached, prompt, taken_s in unread)
            unread.clear()
            self.overhead_s, self.s_per_flop = _fit(sorted(self._observed))
            self._num_to_fit = _FIT_EVERY if self.is_known else 1

    @property
    def is_timed(self) -> bool:
        """True once enough prefills were timed by themselves."""
        return bool(self._observed)

    def observe_whole(self, num_cached_tokens: int, num_prompt_tokens: int, num_passes: int, seconds: float) -> None:
        """Note that a whole answer took `seconds` and `num_passes` passes, 1 or more; ignored once `is_timed`."""
        if self.is_timed:
            return
        self._whole.append((self.flops(num_cached_tokens, num_prompt_tokens), num_passes, seconds))
        if len(self._whole) >= MIN_OBSERVED:
            self.overhead_s, self.s_per_flop = _fit_whole(sorted(self._whole))

    def flops(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        """FLOPs of a prefill."""
        return self._flops(num_prompt_tokens) - self._flops(num_cached_tokens)

    def seconds(self, num_cached_tokens: int, num_prompt_tokens: int) -> float:
        """Compute this module's formula."""
        cached = require_lengths(num_cached_tokens, num_prompt_tokens)
        if self._prior is not None and not self.is_known:
            return self._prior.seconds(cached, num_prompt_tokens)
        return self.overhead_s + self.s_per_flop * self.flops(cached, num_prompt_tokens)

    def smallest_cached_tokens(self, num_prompt_tokens: int, budget_s: float) -> int | None:
        """By bisection: more cached is never slower. The prior's while nothing is known, None without one."""
        if not self.is_known:
            return None if self._prior is None else self._prior.smallest_cached_tokens(num_prompt_tokens, budget_s)
        longest = num_prompt_tokens - 1
        lengths = range(longest + 1)
        found = bisect_left(lengths, True, key=lambda cached: self.seconds(cached, num_prompt_tokens) <= budget_s)
        return found if found <= longest else None


def _fit(rising: list[tuple[float, float]]) -> tuple[float, float]:
    """Overhead and slope of FLOPs and seconds, rising by FLOPs."""
    slope = _slope(rising)
    if not slope:
        # All of one size, or the large ones no slower: what there is to see is what a FLOP took in all.
        return 0.0, median([seconds / flops for flops, seconds in rising if flops > 0]) if rising[-1][0] > 0 else 0.0
    return max(median([seconds - slope * flops for flops, seconds in rising]), 0.0), slope


def _fit_whole(rising: list[tuple[float, int, float]]) -> tuple[float, float]:
    """Fit the seconds of a pass and of a FLOP to FLOPs, passes and seconds, rising by FLOPs."""
    slope = pass_s = 0.0
    for _ in range(_NUM_TURNS):
        slope = _slope([(flops, seconds - pass_s * passes) for flops, passes, seconds in rising])
        pass_s = max(median([(seconds - slope * flops) / passes for flops, passes, seconds in rising]), 0.0)
    return (pass_s, slope) if slope else _fit([(flops, seconds / passes) for flops, passes, seconds in rising])


def _slope(rising: list[tuple[float, float]]) -> float:
    """Correlate FLOPs and seconds, rising by FLOPs; 0 where they do not rise together."""
    half = len(rising) // 2
    pairs = zip(rising[:half], rising[-half:], strict=True)
    slopes = [(high_s - low_s) / (high - low) for (low, low_s), (high, high_s) in pairs if high > low]
    return max(median(slopes), 0.0) if slopes else 0.0
