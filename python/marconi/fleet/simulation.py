"""The clock of a fleet's simulation: requests arrive at their times, however late the answers before them are.

    arrival    the dispatcher chooses a worker, which queues the request
    begin, prefilled, finished     on the worker
    received   the events of a finished request reach the router, `event_delay_s` later

Events of the clock run in order of time, those of one moment in the order in which they were scheduled, arrivals last.
With one worker this is a queue before a cache. Nothing depends on the machine.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from marconi.events.base import Batch
from marconi.fleet.variants import Variant
from marconi.fleet.worker import Job, SimulatedWorker
from marconi.policy.request import Trace
from marconi.replay.outcome import PROGRESS_STEP, Progress
from marconi.router.dispatch import Dispatcher
from marconi.router.routing import Reason

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
    dispatcher: Dispatcher,
    variant: Variant,
    event_delay_s: float = DEFAULT_EVENT_DELAY_S,
    progress: Progress | None = None,
) -> FleetOutcome:
    """Serve every request of `trace`, each once, by `workers`, which the dispatcher does not know yet."""
    clock = _Clock(trace, workers, dispatcher, variant, event_delay_s, progress)
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
        dispatcher: Dispatcher,
        variant: Variant,
        event_delay_s: float,
        progress: Progress | None,
    ) -> None:
        self._trace = trace
        self._numbers = {worker.name: number for number, worker in enumerate(workers)}
        self._workers = workers
        self._dispatcher = dispatcher
        self._variant = variant
        self._event_delay_s = event_delay_s
        self._progress = progress
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_set_off = self._num_finished = 0
        size = len(trace.requests)
        self.outcome = FleetOutcome([0] * size, [0] * size, [0.0] * size, [0] * size)
        for worker in workers:
            dispatcher.add_worker(worker.name)

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
        ticket = self._dispatcher.dispatch(self._variant.prompt(request, self._trace.unit_tokens), now_s)
        decision = ticket.decision
        number = outcome.worker_of[position] = self._numbers[decision.worker.name]
        outcome.promised_tokens[position] = min(decision.worker.num_hit_tokens, request.num_prompt_tokens - 1)
        outcome.reasons[decision.reason] += 1
        worker = self._workers[number]
        worker.add(Job(position, request, ticket))
        self._begin(worker, now_s)

    def _at(self, at_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, self._num_set_off, happen))
        self._num_set_off += 1

    def _begin(self, worker: SimulatedWorker, now_s: float) -> None:
        begun = worker.begin(now_s)
        if begun is not None:
            job, num_hit_tokens, seconds = begun
            self.outcome.hit_tokens[job.position] = num_hit_tokens
            self._at(now_s + seconds, lambda at_s: self._prefilled(worker, job, at_s))

    def _prefilled(self, worker: SimulatedWorker, job: Job, now_s: float) -> None:
        self.outcome.ttft_s[job.position] = now_s - job.request.arrival_s
        self._dispatcher.answered(job.ticket, now_s)
        decoding_s, batch = worker.prefilled(job, now_s)
        self._publish(batch, now_s)
        if decoding_s:
            self._at(now_s + decoding_s, lambda at_s: self._finished(worker, job, at_s))
            self._begin(worker, now_s)
        else:
            self._finished(worker, job, now_s)

    def _finished(self, worker: SimulatedWorker, job: Job, now_s: float) -> None:
        batch = worker.finished(job, now_s)
        self._dispatcher.ended(job.ticket, now_s)
        self._publish(batch, now_s)
        self._num_finished += 1
        if self._progress is not None and self._num_finished % PROGRESS_STEP == 0:
            self._progress(PROGRESS_STEP)
        if self._progress is not None and self._num_finished == len(self._trace.requests):
            self._progress(self._num_finished % PROGRESS_STEP)
        self._begin(worker, now_s)

    def _publish(self, batch: Batch | None, now_s: float) -> None:
        """A batch is on its way to the router, if there is one."""
        if batch is not None and self._event_delay_s:
            self._at(now_s + self._event_delay_s, lambda at_s: self._received(batch, at_s))
        elif batch is not None:
            self._received(batch, now_s)

    def _received(self, batch: Batch, now_s: float) -> None:
        self._dispatcher.fleet.receive(batch, now_s)
