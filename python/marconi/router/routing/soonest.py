"""Soonest: the worker that is expected to give the first token first, from what it has of the prompt.

    state-aware   what a worker has ends at its deepest state with all KV before it
    kv-only       what a worker has is its KV, as routers believe that know no states

Both are this rule; they differ in what they count. Three things are asked in turn:

1. *Cold.* Where nobody has at least `min_share` of the prompt, there is nothing to lose: the least loaded worker takes
   it. So cold prefixes spread. A share too small lets a common greeting decide where a long document goes; one too
   large forgets what a worker does have.
2. *Sticky while balanced.* The worker with the most of the prompt keeps it, as long as its first token is expected
   no later than `slack` times the soonest, and `grace_s` on top of it. Without them a session wanders whenever two
   workers are nearly equal, and each leaves a copy that the other then lacks.
3. *Else the soonest.* Its own worker is so busy that computing the prompt anew elsewhere comes first: the prefix is
   hot, and from now on has a second home.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from marconi.model.latency import LatencyModel
from marconi.router.routing.base import Decision, Query, Reason, Worker, expected_ttft_s, rendezvous
from marconi.router.routing.least_loaded import least_loaded


@dataclass(frozen=True, slots=True)
class Soonest:
    """The worker whose first token is expected first, with a preference for the one that has most."""

    latency: LatencyModel
    num_cached_tokens: Callable[[Worker], int]
    """What a worker is believed to have of the prompt."""
    min_share: float = 0.05
    slack: float = 1.5
    grace_s: float = 0.05

    def __post_init__(self) -> None:
        """Raise `ValueError` for parameters that make no sense."""
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share is {self.min_share}; 0 to 1 is right")
        if not self.slack >= 1:
            raise ValueError(f"slack is {self.slack}; at least 1 is right")
        if not self.grace_s >= 0:
            raise ValueError(f"grace_s is {self.grace_s}; at least 0 is right")

    def choose(self, query: Query, workers: Sequence[Worker]) -> Decision:
        """Cold to the least loaded, else to the one that has most, else to the soonest."""
        most = max(self.num_cached_tokens(worker) for worker in workers)
        if most == 0 or most < self.min_share * query.num_prompt_tokens:
            return self._decide(query, least_loaded(query, workers), Reason.COLD)
        soonest = min(self._ttft_s(query, worker) for worker in workers)
        homes = [worker for worker in workers if self.num_cached_tokens(worker) == most]
        best = min(self._ttft_s(query, worker) for worker in homes)
        if best <= self.slack * soonest + self.grace_s:
            equal = [worker for worker in homes if self._ttft_s(query, worker) == best]
            return self._decide(query, rendezvous(query.key, equal), Reason.HIT)
        equal = [worker for worker in workers if self._ttft_s(query, worker) == soonest]
        return self._decide(query, rendezvous(query.key, equal), Reason.OVERFLOW)

    def _ttft_s(self, query: Query, worker: Worker) -> float:
        return expected_ttft_s(self.latency, query, worker, self.num_cached_tokens(worker))

    def _decide(self, query: Query, worker: Worker, reason: Reason) -> Decision:
        return Decision(worker, reason, self._ttft_s(query, worker))


def state_aware(latency: LatencyModel, min_share: float = 0.05, slack: float = 1.5, grace_s: float = 0.05) -> Soonest:
    """By what can be started from: states with all KV before them."""
    return Soonest(latency, lambda worker: worker.num_hit_tokens, min_share, slack, grace_s)


def kv_only(latency: LatencyModel, min_share: float = 0.05, slack: float = 1.5, grace_s: float = 0.05) -> Soonest:
    """By KV alone, as today's routers."""
    return Soonest(latency, lambda worker: worker.num_kv_tokens, min_share, slack, grace_s)
