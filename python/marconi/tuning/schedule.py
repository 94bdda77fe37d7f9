"""The schedule of tuning: values to try, the length of a window, and how sure a gain must be."""

import math
from dataclasses import dataclass

from marconi.policy.eviction.utility import ALPHAS
from marconi.tuning.choice import LRU


@dataclass(frozen=True, slots=True)
class Schedule:
    """A tuner's own parameters. `ValueError` for what cannot be."""

    grid: tuple[float, ...] = ALPHAS
    margin: float = 0.001
    """Score by which a value must be better, 0.1 points of hit rate: less is not worth a change."""
    caution: float = 2.0
    """Standard errors by which a gain must differ from none; with 0, the mean gain decides."""
    num_remembered: int = 16
    """Windows whose gains count: more are surer, fewer follow the traffic sooner."""
    bootstrap_multiple: float = 5.0
    """Requests in a window, in multiples of those before the first eviction: by then the cache has turned over."""
    min_requests: int = 100
    """Bound from below: fewer requests do not tell values apart."""
    max_requests: int = 250
    """Bound from above: a value that traffic has outrun is noticed a window later. Being sure takes many windows, not
    long ones."""
    max_path_bytes: int = 1 << 28
    """Paths that a window keeps alive and sends, at most about so much: long prompts of single tokens add up."""

    def __post_init__(self) -> None:
        if LRU not in self.grid:
            raise ValueError(f"a grid without {LRU}, recency alone: nothing to measure the others by")
        for name, value in (*(("a value of the grid", value) for value in self.grid), ("caution", self.caution)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number, 0 or more, got {value}")
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must be a share from 0 to less than 1, got {self.margin}")
        if not 0 < self.bootstrap_multiple < math.inf:
            raise ValueError(f"bootstrap_multiple must be a finite number above 0, got {self.bootstrap_multiple}")
        for name in ("num_remembered", "min_requests", "max_path_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.max_requests < self.min_requests:
            raise ValueError(f"max_requests is {self.max_requests}; no less than min_requests, {self.min_requests}")

    def num_window_requests(self, num_bootstrap_requests: int) -> int:
        """Requests in a window of a cache that first evicted after `num_bootstrap_requests`."""
        wanted = math.ceil(self.bootstrap_multiple * num_bootstrap_requests)
        return min(max(wanted, self.min_requests), self.max_requests)
