"""Least loaded: the worker with the least work ahead, whatever it has of the prompt.

Among those with equally much ahead, the one with the fewest requests, then the one that the request's key belongs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from marconi.model.latency import LatencyModel
from marconi.router.routing.base import Decision, Query, Reason, Worker, expected_ttft_s, rendezvous


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The worker that has least to do."""

    latency: LatencyModel

    def choose(self, query: Query, workers: Sequence[Worker]) -> Decision:
        """Choose by work ahead, then by requests, then by the key."""
        worker = least_loaded(query, workers)
        return Decision(
            worker, Reason.LEAST_LOADED, expected_ttft_s(self.latency, query, worker, worker.num_hit_tokens)
        )


def least_loaded(query: Query, workers: Sequence[Worker]) -> Worker:
    """The one of `workers` that has least to do."""
    least = min((worker.work_ahead_s, worker.num_running) for worker in workers)
    return rendezvous(query.key, [each for each in workers if (each.work_ahead_s, each.num_running) == least])
