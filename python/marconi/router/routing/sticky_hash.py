"""Sticky by hash: the worker that the request's key belongs to, as a router without any knowledge of caches can do.

With a bound on its load, after consistent hashing with bounded loads (Mirrokni et al., 2018): a worker that runs
`max_load` times the mean number of requests, this one counted, passes it on to the next that the key would belong to.
Infinity keeps a request with its own worker whatever happens. Smaller values spread hot prefixes sooner and lose more
hits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from marconi.model.latency import LatencyModel
from marconi.router.routing.base import Decision, Query, Reason, Worker, expected_ttft_s, rendezvous


@dataclass(frozen=True, slots=True)
class StickyHash:
    """The key's worker, or the next that has room."""

    latency: LatencyModel
    max_load: float = 1.25

    def __post_init__(self) -> None:
        """Raise `ValueError` for a bound below the mean."""
        if not self.max_load >= 1:
            raise ValueError(f"max_load must be 1 or more, times the mean, got {self.max_load}")

    def choose(self, query: Query, workers: Sequence[Worker]) -> Decision:
        """Choose by rendezvous, among those within the bound."""
        own = rendezvous(query.key, workers)
        mean = (sum(worker.num_running for worker in workers) + 1) / len(workers)
        bound = self.max_load * mean if math.isinf(self.max_load) else math.ceil(self.max_load * mean)
        worker = own
        if own.num_running >= bound:
            worker = rendezvous(query.key, [each for each in workers if each.num_running < bound])
        reason = Reason.KEY if worker is own else Reason.OVERFLOW
        return Decision(worker, reason, expected_ttft_s(self.latency, query, worker, worker.num_hit_tokens))
