"""Round-robin: each worker in its turn, whatever it has.

The turn goes by names, so a worker that comes or goes takes no other's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from marconi.model.latency import LatencyModel
from marconi.router.routing.base import Decision, Query, Reason, Worker, expected_ttft_s


@dataclass(slots=True)
class RoundRobin:
    """The worker after the last one, by name."""

    latency: LatencyModel
    _last: str = field(default="", init=False)

    def choose(self, query: Query, workers: Sequence[Worker]) -> Decision:
        """The next name after the last, or the first."""
        after = [worker for worker in workers if worker.name > self._last]
        worker = min(after or workers, key=lambda each: each.name)
        self._last = worker.name
        return Decision(worker, Reason.TURN, expected_ttft_s(self.latency, query, worker, worker.num_hit_tokens))
