"""Counts of what a cache has done. Owner: `HybridCache`, which alone changes them."""

from dataclasses import dataclass, field

from marconi.policy.base import Need
from marconi.policy.causes import Cause
from marconi.policy.misses import Explanation

MAX_UNCOUNTED = 256


@dataclass(slots=True)
class Counters:
    """Counts of requests, states and tokens."""

    num_requests: int = 0
    num_too_large: int = 0
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    counted: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(Cause, 0))
    """`num_missed_tokens` without those of `uncounted`."""
    uncounted: list[Explanation] = field(default_factory=list)
    """The latest, up to `MAX_UNCOUNTED`: counted together, each takes a fraction of the time."""
    num_states_written: int = 0
    num_states_hit: int = 0
    num_evictions: dict[Need, int] = field(default_factory=lambda: dict.fromkeys(Need, 0))
    num_evictions_unused: int = 0
    """Victims whose state no request had started from."""
    num_evicted_tokens: int = 0
    num_loads: int = 0
    """Requests that started from a copy on the host."""
    num_loaded_tokens: int = 0
    """Tokens whose KV was loaded for them."""
    load_s: float = 0.0
    """Seconds that it took."""

    @property
    def num_missed_tokens(self) -> dict[Cause, int]:
        """Prompt tokens that were computed, by cause; those of uncached requests are in no other count of tokens."""
        if self.uncounted:
            self._count()
        return self.counted

    def missed(self, explanation: Explanation) -> None:
        """A request misses what `explanation` says."""
        self.uncounted.append(explanation)
        if len(self.uncounted) >= MAX_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        counted = self.counted
        for _, start, _, parts in self.uncounted:
            for end, cause, _, _ in parts:
                counted[cause] += end - start  # type: ignore[index]
                start = end
        self.uncounted.clear()
