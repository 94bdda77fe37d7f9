"""The clock of a fleet's simulation: requests arrive at their times, however late the answers before them are.

    arrival    the dispatcher of a gateway chooses a worker, which queues the request
    begin, prefilled, finished     on the worker
    received   a worker's events and its load reach every gateway, `event_delay_s` later

Several gateways get the requests in turn, so that the turns of one session meet different ones. Each knows what it sent
itself; of what others sent it knows the workers' events and their loads. A worker reports its load when it looks for
the next request to prefill, and every `LOAD_PERIOD_S` while it is busy, as a server does.

Events of the clock run in order of time, those of one moment in the order in which they were scheduled, arrivals last.
With one worker this is a queue before a cache. Nothing depends on the machine.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from marconi.events.base import LOAD_PERIOD_S, Batch
from marconi.policy.request import Trace
from marconi.replay.outcome import PROGRESS_STEP, Progress
from marconi.router.dispatch import Dispatcher
from marconi.router.routing import Reason
from marconi_lab.fleet.variants import Variant
from marconi_lab.fleet.worker import Job, SimulatedWorker

DEFAULT_EVENT_DELAY_S = 0.1
"""The longest delay by a live worker's batching of events."""


@dataclass(slots=True)
class FleetOutcome:
    """The outcome of a simulation: in each list an entry a request, in order of arrival."""

    hit_tokens: list[int]
    promised_tokens: list[int]
    """Tokens of each prompt that the router expected the chosen worker to start from."""
    ttft_s: list[float]
    worker_of: list[int]
    reasons: Counter[Reason] = field(default_factory=Counter)


def simulate(
    trace: Trace,
    workers: list[SimulatedWorker],
    gateways: Sequence[Dispatcher],
    variant: Variant,
    event_delay_s: float = DEFAULT_EVENT_DELAY_S,
    progress: Progress | None = None,
) -> FleetOutcome:
    """Serve every request of `trace`, each once, by `workers`, which the gateways, one or more, do not know yet."""
    clock = _Clock(trace, workers, gateways, variant, event_delay_s, progress)
    for position, request in enumerate(trace.requests):
        clock.run_until(request.arrival_s)
        clock.arrive(position)
    clock.run_until(float("inf"))
    return clock.outcome


class _Clock:
    def __init__(
        self,
        trace: Trace,
        workers: list[SimulatedWorker],
        gateways: Sequence[Dispatcher],
        variant: Variant,
        event_delay_s: float,
        progress: Progress | None,
    ) -> None:
        self._trace = trace
        self._numbers = {worker.name: number for number, worker in enumerate(workers)}
        self._workers = workers
        self._gateways = gateways
        self._variant = variant
        self._event_delay_s = event_delay_s
        self._progress = progress
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_set_off = self._num_finished = 0
        size = len(trace.requests)
        self.outcome = FleetOutcome([0] * size, [0] * size, [0.0] * size, [0] * size)
        self._told_s: dict[SimulatedWorker, float] = {}
        """When each of the workers that will report their load again did so last."""
        for worker in workers:
            for gateway in gateways:
                gateway.add_worker(worker.name)

    def run_until(self, now_s: float) -> None:
        """Run everything that is scheduled up to a moment."""
        events = self._events
        while events and events[0][0] <= now_s:
            at_s, _, happen = heapq.heappop(events)
            happen(at_s)

    def arrive(self, position: int) -> None:
        """Dispatch a request of the trace."""
        request, outcome = self._trace.requests[position], self.outcome
        now_s = request.arrival_s
        gateway = self._gateways[position % len(self._gateways)]
        ticket = gateway.dispatch(self._variant.prompt(request, self._trace.unit_tokens), now_s)
        decision = ticket.decision
        number = outcome.worker_of[position] = self._numbers[decision.worker.name]
        outcome.promised_tokens[position] = min(decision.worker.num_hit_tokens, request.num_prompt_tokens - 1)
        outcome.reasons[decision.reason] += 1
        worker = self._workers[number]
        worker.add(Job(position, request, gateway, ticket))
        self._begin(worker, now_s)

    def _at(self, at_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, self._num_set_off, happen))
        self._num_set_off += 1

    def _begin(self, worker: SimulatedWorker, now_s: float) -> None:
        if worker.is_prefilling:
            return
        begun = worker.begin(now_s)
        if begun is not None:
            job, num_hit_tokens, seconds = begun
            self.outcome.hit_tokens[job.position] = num_hit_tokens
            self._at(now_s + seconds, lambda at_s: self._prefilled(worker, job, at_s))
        self._report_load(worker, now_s)

    def _prefilled(self, worker: SimulatedWorker, job: Job, now_s: float) -> None:
        self.outcome.ttft_s[job.position] = now_s - job.request.arrival_s
        job.gateway.answered(job.ticket, now_s)
        decoding_s, batch = worker.prefilled(job, now_s)
        self._publish(batch, now_s)
        if decoding_s:
            self._at(now_s + decoding_s, lambda at_s: self._finished(worker, job, at_s))
            self._begin(worker, now_s)
        else:
            self._finished(worker, job, now_s)

    def _finished(self, worker: SimulatedWorker, job: Job, now_s: float) -> None:
        batch = worker.finished(job, now_s)
        job.gateway.ended(job.ticket, now_s)
        self._publish(batch, now_s)
        self._num_finished += 1
        if self._progress is not None and self._num_finished % PROGRESS_STEP == 0:
            self._progress(PROGRESS_STEP)
        if self._progress is not None and self._num_finished == len(self._trace.requests):
            self._progress(self._num_finished % PROGRESS_STEP)
        self._begin(worker, now_s)

    def _report_load(self, worker: SimulatedWorker, now_s: float) -> None:
        """Send the worker's load on its way, and again as long as the worker is busy."""
        batch = worker.load_batch(now_s)
        self._publish(batch, now_s)
        if batch is None:
            return
        if worker not in self._told_s and not worker.is_idle:
            self._at(now_s + LOAD_PERIOD_S, lambda at_s: self._tell_again(worker, at_s))
        if worker in self._told_s or not worker.is_idle:
            self._told_s[worker] = now_s

    def _tell_again(self, worker: SimulatedWorker, now_s: float) -> None:
        due_s = self._told_s[worker] + LOAD_PERIOD_S
        if now_s < due_s:
            self._at(due_s, lambda at_s: self._tell_again(worker, at_s))
            return
        del self._told_s[worker]
        if not worker.is_idle:
            self._report_load(worker, now_s)

    def _publish(self, batch: Batch | None, now_s: float) -> None:
        """A batch is on its way to the gateways, if there is one."""
        if batch is not None and self._event_delay_s:
            self._at(now_s + self._event_delay_s, lambda at_s: self._received(batch, at_s))
        elif batch is not None:
            self._received(batch, now_s)

    def _received(self, batch: Batch, now_s: float) -> None:
        for gateway in self._gateways:
            gateway.fleet.receive(batch, now_s)
