"""Soonest: the worker that is expected to give the first token first, from what it has of the prompt.

    state-aware   what a worker has ends at its deepest state with all KV before it; cold prompts are placed by memory
    kv-only       what a worker has is its KV, as routers believe that know no states; cold prompts go by load alone

Both are this rule; they differ in what they count and in where cold prompts go. A worker is *in time* if its first
token is expected no later than `slack` times the soonest, and `grace_s` on top of it. Three steps:

1. *Cold.* Where nobody has at least `min_share` of the prompt, there is little to lose: it is placed among the workers
   in time. A share too small lets a common greeting decide where a long document goes; one too large forgets what a
   worker does have.
2. *Sticky while balanced.* The worker with the most of the prompt keeps it, as long as it is in time. Without slack a
   session wanders whenever two workers are nearly equal, and each leaves a copy that the other then lacks.
3. *Else the soonest.* Its own worker is so busy that computing the prompt anew elsewhere comes first: the prefix is
   hot, and from now on has a second worker.

Placing by load: to the least loaded. Placing by memory:

a. *Affinity.* The worker that served at least `AFFINITY_SHARE` of the prompt last: it may still know it as a ghost, so
   that this occurrence counts as its second and not as another first, and what its cache learns of the prefix is
   learned in one place.
b. Else *the least warm*: of the workers in time, the one whose prefixes were used least lately. At equal memory,
   workers that are equally warm evict prefixes of equal age, as one cache of the whole memory would.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from marconi.model.latency import LatencyModel
from marconi.router.routing.base import Decision, Query, Reason, Worker, expected_ttft_s, rendezvous
from marconi.router.routing.least_loaded import least_loaded

AFFINITY_SHARE = 0.5

Placement: TypeAlias = Callable[[Query, Sequence[Worker]], tuple[Worker, Reason]]
"""Names one of the workers in time for a cold prompt, and why it."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Which workers are in time, and from which share of a prompt on it is not cold."""

    min_share: float = 0.05
    slack: float = 1.5
    grace_s: float = 0.05

    def __post_init__(self) -> None:
        """Raise `ValueError` for parameters that make no sense."""
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share must be 0 to 1, got {self.min_share}")
        if not self.slack >= 1:
            raise ValueError(f"slack must be 1 or more, got {self.slack}")
        if not self.grace_s >= 0:
            raise ValueError(f"grace_s must be 0 or more, got {self.grace_s}")

    def latest_s(self, soonest_s: float) -> float:
        """The latest first token that is in time."""
        return self.slack * soonest_s + self.grace_s


@dataclass(frozen=True, slots=True)
class Soonest:
    """The worker whose first token is expected first, with a preference for the one that has most."""

    latency: LatencyModel
    num_cached_tokens: Callable[[Worker], int]
    """Tokens that a worker is believed to have of the prompt."""
    place: Placement
    tolerance: Tolerance

    def choose(self, query: Query, workers: Sequence[Worker]) -> Decision:
        """Choose where a cold prompt is placed, else the worker that has most, else the soonest."""
        cached = [self.num_cached_tokens(worker) for worker in workers]
        prefill_s = {num_tokens: self._prefill_s(query, num_tokens) for num_tokens in set(cached)}
        ttft_s = [worker.work_ahead_s + prefill_s[tokens] for worker, tokens in zip(workers, cached, strict=True)]
        most, soonest_s = max(cached), min(ttft_s)
        latest_s = self.tolerance.latest_s(soonest_s)
        known = list(zip(workers, cached, ttft_s, strict=True))
        if most == 0 or most < self.tolerance.min_share * query.num_prompt_tokens:
            worker, reason = self.place(query, [worker for worker, _, at_s in known if at_s <= latest_s])
            return Decision(worker, reason, worker.work_ahead_s + prefill_s[self.num_cached_tokens(worker)])
        best_s = min(at_s for _, tokens, at_s in known if tokens == most)
        if best_s <= latest_s:
            equal = [worker for worker, tokens, at_s in known if (tokens, at_s) == (most, best_s)]
            return Decision(rendezvous(query.key, equal), Reason.HIT, best_s)
        equal = [worker for worker, _, at_s in known if at_s == soonest_s]
        return Decision(rendezvous(query.key, equal), Reason.OVERFLOW, soonest_s)

    def _prefill_s(self, query: Query, num_cached_tokens: int) -> float:
        return expected_ttft_s(self.latency, query, _IDLE, num_cached_tokens)


_IDLE = Worker("")


def by_load(query: Query, workers: Sequence[Worker]) -> tuple[Worker, Reason]:
    """Place a prompt on the least loaded worker."""
    return least_loaded(query, workers), Reason.COLD


def by_memory(query: Query, workers: Sequence[Worker]) -> tuple[Worker, Reason]:
    """Place a prompt on the worker that served it last, else on the least warm, of several the least loaded."""
    for worker in workers:
        if worker.num_seen_tokens and worker.num_seen_tokens >= AFFINITY_SHARE * query.num_prompt_tokens:
            return worker, Reason.AFFINITY
    least = min(worker.num_warm_tokens for worker in workers)
    return least_loaded(query, [worker for worker in workers if worker.num_warm_tokens == least]), Reason.COLD


def state_aware(latency: LatencyModel, tolerance: Tolerance | None = None) -> Soonest:
    """The rule by what can be started from: states with all KV before them."""
    return Soonest(latency, lambda worker: worker.num_hit_tokens, by_memory, tolerance or STATE_AWARE)


def kv_only(latency: LatencyModel, tolerance: Tolerance | None = None) -> Soonest:
    """The rule by KV alone, as today's routers have it."""
    return Soonest(latency, lambda worker: worker.num_kv_tokens, by_load, tolerance or Tolerance())


STATE_AWARE = Tolerance(min_share=0.2, slack=2.0, grace_s=1.0)
"""Between values tried on tuning halves, whose differences are within chance: `docs/fleet-simulation.md`."""
