"""The most that any rule can hit: a bound over everything that could be admitted, kept and evicted.

A hit of request i at depth d takes memory since the last requests j that computed it (`reuse.py`), whatever the rule:

    m(i, d) = sum over its stretches above d of  KV(stretch) x (i - since)   +   state x (i - since of the last)

in bytes x requests. What requests take does not overlap, for each use begins where the one before ended. At no time may
a rule hold more than there is, C. Put a price p(t) on a byte between requests t and t + 1, and let every request choose
for itself what pays, d or nothing:

    most hits <= sum over t of C p(t)  +  sum over i of max over d of ( d - m(i, d) at these prices )

That is Lagrange's dual of the hindsight optimum with admission and unequal sizes: no rule beats it, *whatever* the
prices are, and better prices only make it tighter. With one price for all times it is the relaxation behind PFOO's
upper bound (Berger, Beckmann and Harchol-Balter, SIGMETRICS 2018), of tokens on a path instead of objects. Prices are
improved by steps against the gradient, what is free on average less what is used, each as long as its own history
allows (AdaGrad). Two pools have a price each.

Source of the bound's first form: arXiv 1711.03709, section 4.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from marconi.replay.reuse import Reuse

NUM_WINDOWS: Final = 256
"""Stretches of time that have a price of their own."""
NUM_STEPS: Final = 120
STEP: Final = 0.3
NUM_HALVINGS: Final = 24
ROUNDING: Final = 1e-9
"""Share by which sums of floating-point numbers may be off."""

Prices = NDArray[np.float64]
"""By limit and window, in tokens for a unit of the limit and a request's time."""


class Limit(NamedTuple):
    """Memory that there is, and what a token of KV and a state take of it, in any unit."""

    size: float
    per_token: float
    per_state: float


def most_hit_tokens(reuse: Reuse, limits: Sequence[Limit]) -> int:
    """Tokens that no rule exceeds which holds no more than `limits` between any two requests of the trace."""
    if not len(reuse.request):
        return 0
    dual = _Dual(reuse, limits)
    prices = np.zeros((len(limits), dual.num_windows))
    best, gradient = dual(prices)
    if (gradient < 0).any():
        prices = dual.constant_prices()
        scale = prices.mean(axis=1, keepdims=True)
        relative, history = prices / np.maximum(scale, np.finfo(float).tiny), np.zeros_like(prices)
        for _ in range(NUM_STEPS):
            bound, gradient = dual(relative * scale)
            best = min(best, bound)
            gradient *= scale
            history += gradient**2
            relative = np.maximum(0, relative - STEP * gradient / np.sqrt(np.maximum(history, np.finfo(float).tiny)))
    return min(int(best * (1 + ROUNDING)), reuse.num_shared_tokens)


class _Dual:
    """The bound at given prices, and its gradient."""

    def __init__(self, reuse: Reuse, limits: Sequence[Limit]) -> None:
        self._reuse = reuse
        self._limits = limits
        num_requests = reuse.num_requests
        self.num_windows = min(NUM_WINDOWS, num_requests)
        self._window = np.arange(num_requests) * self.num_windows // num_requests
        """The window of each request: the one that covers the time from it until the next request."""
        self._window_size = np.bincount(self._window, minlength=self.num_windows)
        self._first = np.flatnonzero(np.diff(reuse.request, prepend=-1))
        """Where the stretches of each request begin."""
        self._count = np.diff(self._first, append=len(reuse.request))
        self._position = np.arange(len(reuse.request))

    def __call__(self, prices: Prices) -> tuple[float, Prices]:
        """The bound in tokens, and its slope by each price."""
        reuse, limits = self._reuse, self._limits
        paid = np.concatenate([np.zeros((len(limits), 1)), np.cumsum(prices[:, self._window], axis=1)], axis=1)
        for_held = paid[:, reuse.request] - paid[:, reuse.since]
        per_token, per_state = (np.array([limit[field] for limit in limits]) for field in (1, 2))
        gains = reuse.num_tokens * (1 - per_token @ for_held)
        sums = np.cumsum(gains)
        before = np.repeat(sums[self._first] - gains[self._first], self._count)
        values = sums - before - per_state @ for_held
        best = np.maximum.reduceat(values, self._first)
        ends = self._ends_of(values, best)
        bound = float(np.maximum(best, 0).sum()) + sum(
            limit.size * float(each @ self._window_size) for limit, each in zip(limits, prices, strict=True)
        )
        return bound, self._gradient(ends)

    def constant_prices(self) -> Prices:
        """Prices that do not change with time: where the bound has its least, limit by limit."""
        prices = np.zeros((len(self._limits), self.num_windows))
        for _ in range(1 if len(self._limits) == 1 else 3):
            for row, limit in enumerate(self._limits):
                # A state saves so many tokens at most, and a token one.
                dearest = max(
                    (
                        gain / taken
                        for gain, taken in ((1.0, limit.per_token), (self._longest, limit.per_state))
                        if taken
                    ),
                    default=0.0,
                )
                low, high = ROUNDING * dearest, dearest
                for _ in range(NUM_HALVINGS):
                    middle = (low * high) ** 0.5
                    prices[row] = middle
                    is_cheap = self(prices)[1][row].sum() < 0
                    low, high = (middle, high) if is_cheap else (low, middle)
                prices[row] = high
        return prices

    @property
    def _longest(self) -> float:
        return float(np.add.reduceat(self._reuse.num_tokens, self._first).max())

    def _ends_of(self, values: NDArray[np.float64], best: NDArray[np.float64]) -> NDArray[np.int64]:
        """The position of the last stretch that each request takes, the first of equals; -1 for one that takes none."""
        is_best = values == np.repeat(best, self._count)
        ends = np.minimum.reduceat(np.where(is_best, self._position, len(values)), self._first)
        return np.where(best > 0, ends, -1)

    def _gradient(self, ends: NDArray[np.int64]) -> Prices:
        reuse = self._reuse
        taken = self._position <= np.repeat(ends, self._count)
        tokens = self._held(reuse.since[taken], reuse.request[taken], reuse.num_tokens[taken])
        last = ends[ends >= 0]
        states = self._held(reuse.since[last], reuse.request[last], np.ones(len(last)))
        return np.array(
            [
                limit.size * self._window_size - limit.per_token * tokens - limit.per_state * states
                for limit in self._limits
            ]
        )

    def _held(
        self, since: NDArray[np.int64], until: NDArray[np.int64], amount: NDArray[np.number[Any]]
    ) -> NDArray[np.float64]:
        """The amount held in each window, in amount x requests."""
        size = self._reuse.num_requests
        change = np.bincount(since, amount, size) - np.bincount(until, amount, size)
        return np.bincount(self._window, np.cumsum(change), self.num_windows).astype(np.float64)
