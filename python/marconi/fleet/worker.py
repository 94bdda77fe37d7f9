"""One simulated worker: requests wait, are prefilled one after the other in order of arrival, and decode beside.

    begin      its turn has come: match, lock the state that it starts from
    prefilled  its first token; the next one's turn
    finished   the answer is decoded: it leaves its states, evicts, and publishes what changed

As in a queueing replay, states become visible when their request finishes, and the memory is what the cache may hold.
Other than there, decoding takes nothing from prefills: it goes at the speed of a step of all that decode when it
begins. A worker that prefills all the time would decode more slowly, and the same under every rule.
"""

from collections import deque
from dataclasses import dataclass

from marconi.events.base import Batch
from marconi.fleet.tree_events import TreeEvents
from marconi.policy.admission.base import num_processed_tokens
from marconi.policy.lease import Lease
from marconi.policy.request import Request
from marconi.replay.policies import Subject
from marconi.replay.policies.cache import ReplayCache
from marconi.replay.queueing import Speed
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
        """`subject`'s cache is a prefix cache that holds nothing yet."""
        assert isinstance(subject.cache, ReplayCache)
        self.name = name
        self.cache = subject.cache
        self.num_computed_tokens = 0
        """Prompt tokens that it prefilled."""
        self.num_requests = 0
        """Begun."""
        self._served = subject.served
        self._speed = speed
        self._events = TreeEvents(self.cache.tree)
        self.cache.tree.memory = self._events
        self._num_batches = 0
        self._waiting: deque[Job] = deque()
        self._is_prefilling = False
        self._num_decoding = 0
        self._num_context_tokens = 0

    def add(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)

    def begin(self, now_s: float) -> tuple[Job, Lease, float] | None:
        """Begin the next request, if it is its turn; the seconds that its prefill takes."""
        if self._is_prefilling or not self._waiting:
            return None
        job = self._waiting.popleft()
        lease = self.cache.begin(job.request, now_s)
        hit, prompt = lease.match.checkpoint.depth, job.request.num_prompt_tokens
        self.num_requests += 1
        self.num_computed_tokens += prompt - hit
        self._is_prefilling = True
        return job, lease, self._speed.prefill.seconds(hit, prompt)

    def prefilled(self, job: Job) -> float:
        """Note the first token of a request; returns the seconds of decoding that follow."""
        self._is_prefilling = False
        self._num_decoding += 1
        self._num_context_tokens += job.request.num_prompt_tokens
        num_left = num_processed_tokens(job.request) - job.request.num_prompt_tokens
        if not num_left:
            return 0.0
        return self._speed.decode.seconds(self._num_decoding, self._num_context_tokens, num_left)

    def finished(self, job: Job, lease: Lease, now_s: float) -> Batch | None:
        """End a request, which leaves its states; the batch of events, if anything changed."""
        request = job.request
        self._num_decoding -= 1
        self._num_context_tokens -= request.num_prompt_tokens
        self._events.begin(request.namespace)
        self.cache.finish(lease, now_s)
        if self._served is not None:
            self._served(request, now_s)
        events = self._events.take(request.path)
        if not events:
            return None
        self._num_batches += 1
        return Batch(self.name, 0, self._num_batches - 1, events)
