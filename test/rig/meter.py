"""What a cache does for a replay, counted and timed: matches, inserts and evictions, each without those inside it.

It stands around methods of one cache, so what is timed is the cache's own work, with its allocators', and neither the
request's nor the scheduler's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Work(StrEnum):
    """Kinds of work."""

    MATCH = "match"
    """A prompt is looked up."""
    PLAN = "plan"
    """Our cache begins a request and takes slots for the states that a prefill is to leave."""
    INSERT = "insert"
    """What a chunk, or a whole request, has computed joins the tree."""
    EVICT = "evict"
    """Memory is made free."""


_METHODS = {
    "match_prefix": Work.MATCH,
    "plan_prefill": Work.PLAN,
    "checkpoint": Work.INSERT,
    "_evict": Work.EVICT,
}


@dataclass(slots=True)
class Cost:
    """Calls, and seconds in all."""

    num_calls: int = 0
    seconds: float = 0.0


class Meter:
    """Counts and times what `cache` does from now on."""

    def __init__(self, cache: Any) -> None:
        """`cache` is stock or ours, and nobody else's meter is on it."""
        self.costs = {work: Cost() for work in Work}
        self.num_victims = 0
        """Nodes that gave up a state, KV or both."""
        self._num_inserted_states = 0
        self._seconds_inside = 0.0
        self._hybrid = getattr(cache.tree_core, "hybrid", None)
        for name, work in _METHODS.items():
            if hasattr(cache, name):
                setattr(cache, name, self._timed(work, getattr(cache, name)))
        cache.insert = self._watched(cache.insert, self._see_insert)
        if self._hybrid is None:
            cache._evict_device_next_node = self._watched(cache._evict_device_next_node, self._see_step)
        else:
            self._hybrid.evict_node = self._watched(self._hybrid.evict_node, self._see_freed)

    @property
    def num_states_written(self) -> int:
        """States that joined the tree, where it had none."""
        if self._hybrid is not None:
            num_states_written: int = self._hybrid.counters.num_states_written
            return num_states_written
        return self._num_inserted_states

    @property
    def us_per(self) -> dict[str, float]:
        """Microseconds of a call in the mean, and of a victim; 0 for what did not happen."""
        counts = {work: cost.num_calls for work, cost in self.costs.items()} | {Work.EVICT: self.num_victims}
        return {str(work): 1e6 * cost.seconds / max(counts[work], 1) for work, cost in self.costs.items()}

    def _timed(self, work: Work, method: Callable[..., Any]) -> Callable[..., Any]:
        cost = self.costs[work]

        def timed(*args: Any, **kwargs: Any) -> Any:
            seconds_beside, self._seconds_inside = self._seconds_inside, 0.0
            start_s = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start_s
                cost.num_calls += 1
                cost.seconds += seconds - self._seconds_inside
                self._seconds_inside = seconds_beside + seconds

        return timed

    @staticmethod
    def _watched(method: Callable[..., Any], see: Callable[[Any], None]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            see(result)
            return result

        return watched

    def _see_step(self, step: Any) -> None:
        node_id, made_progress = step
        self.num_victims += node_id is not None or made_progress

    def _see_freed(self, _: Any) -> None:
        self.num_victims += 1

    def _see_insert(self, result: Any) -> None:
        self._num_inserted_states += not result.mamba_exist
