"""One simulated worker: requests wait, are prefilled one after the other in order of arrival, and decode beside.

    begin      its turn has come and there is room for it: it takes the state that it starts from
    prefilled  its first token, and the states of its prompt; the next one's turn
    finished   the answer is decoded: its last state joins the tree, and memory is given back

What a step changes in the tree is published at its end. Other than in a queueing replay, decoding takes nothing from
prefills: it goes at the speed of a step of all that decode when it begins. A worker that prefills all the time would
decode more slowly, and the same under every rule.
"""

from collections import deque
from dataclasses import dataclass

from marconi.events.base import Batch
from marconi.fleet.tree_events import TreeEvents
from marconi.policy.request import Request
from marconi.replay.policies import Subject
from marconi.replay.queueing import Batching, Speed
from marconi.replay.server import RunningRequest, ServerReplay
from marconi.router.dispatch import Ticket


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request on a worker."""

    position: int
    """The request's in the trace."""
    request: Request
    ticket: Ticket


class SimulatedWorker:
    """A queue, a cache and its events; the clock is the simulation's."""

    def __init__(self, name: str, subject: Subject, speed: Speed) -> None:
        """`subject` serves by a tree, and has not yet."""
        assert isinstance(subject.cache, ServerReplay)
        self.name = name
        self.server = subject.cache
        self.num_computed_tokens = 0
        """Prompt tokens that it prefilled."""
        self.num_requests = 0
        """Begun."""
        self._speed = speed
        self._max_running = self.server.run_together(Batching().max_running)
        tree = self.server.hybrid.tree
        self._events = tree.memory = TreeEvents(tree)
        self._num_batches = 0
        self._waiting: deque[Job] = deque()
        self._is_prefilling = False
        self._running: dict[Job, RunningRequest | None] = {}
        """None for a request that does not fit: it leaves nothing."""
        self._num_context_tokens = 0

    def add(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)

    def begin(self, now_s: float) -> tuple[Job, int, float] | None:
        """Begin the next request, if it is its turn and there is room; its hit tokens and the seconds of its prefill.

        What nothing runs beside has room.
        """
        if self._is_prefilling or not self._waiting:
            return None
        job = self._waiting[0]
        request, server = job.request, self.server
        running = [run for run in self._running.values() if run is not None]
        if running and not (
            len(running) < self._max_running and server.has_room(request, server.hybrid.match(request), running)
        ):
            return None
        self._waiting.popleft()
        self._events.begin(request.namespace)
        run = server.run(request, now_s) if server.fits(request) else None
        if run is not None:
            run.begin()
        hit, load_s = (0, 0.0) if run is None else (run.num_hit_tokens, run.load_s)
        self._running[job] = run
        self.num_requests += 1
        self.num_computed_tokens += request.num_prompt_tokens - hit
        self._is_prefilling = True
        return job, hit, load_s + self._speed.prefill.seconds(hit, request.num_prompt_tokens)

    def prefilled(self, job: Job, now_s: float) -> tuple[float, Batch | None]:
        """Note the first token of a request; the seconds of decoding that follow, and the events, if any."""
        request, run = job.request, self._running[job]
        self._is_prefilling = False
        self._num_context_tokens += request.num_prompt_tokens
        if run is not None:
            self._events.begin(request.namespace)
            run.now_s = now_s
            run.prefill()
        num_left = request.num_processed_tokens - request.num_prompt_tokens
        decoding_s = self._speed.decode.seconds(len(self._running), self._num_context_tokens, num_left)
        return decoding_s if num_left else 0.0, self._batch(request)

    def finished(self, job: Job, now_s: float) -> Batch | None:
        """End a request, which leaves its last state; the batch of events, if anything changed."""
        request, run = job.request, self._running.pop(job)
        self._num_context_tokens -= request.num_prompt_tokens
        if run is not None:
            self._events.begin(request.namespace)
            run.now_s = now_s
            run.decode()
            run.finish()
        return self._batch(request)

    def _batch(self, request: Request) -> Batch | None:
        """The tree's changes since the last batch as events, those of `request`'s path among them."""
        events = self._events.take(request.path)
        if not events:
            return None
        self._num_batches += 1
        return Batch(self.name, 0, self._num_batches - 1, events)
