"""One simulated worker: requests wait, are prefilled one after the other in order of arrival, and decode beside.

    begin      its turn has come and there is room for it: it takes the state that it starts from
    prefilled  its first token, and the states of its prompt; the next one's turn
    finished   the answer is decoded: its last state joins the tree, and memory is given back

What a step changes in the tree is published at its end. Its load is read as a server's is, as a step begins or while no
prefill runs, and memory as if this prefill had taken its KV. Prompt tokens that wait are SGLang's own estimate: the
share that was not cached of the last `NUM_RECENT` prompts, of all that wait.

Other than in a queueing replay, decoding takes nothing from prefills: it goes at the speed of a step of all that decode
when it begins. A worker that prefills all the time would decode more slowly, and the same under every rule.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Final

from marconi.events.base import Batch, Event, FreeMemory, WorkerLoad
from marconi.policy.request import Request
from marconi.replay.queueing import Batching, Speed
from marconi.replay.server import ReplayedRequest, ServerReplay
from marconi.replay.target import ReplayTarget
from marconi.router.dispatch import Dispatcher, Ticket
from marconi_lab.fleet.tree_events import TreeEvents

NUM_RECENT: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request on a worker."""

    position: int
    """The request's in the trace."""
    request: Request
    gateway: Dispatcher
    """The one that sent it."""
    ticket: Ticket


class SimulatedWorker:
    """A queue, a cache and its events; the clock is the simulation's."""

    def __init__(self, name: str, target: ReplayTarget, speed: Speed, *, reports_load: bool = True) -> None:
        """`target` serves by a tree, and has not yet."""
        assert isinstance(target, ServerReplay)
        self.name = name
        self.server = target
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
        self._prefilling: Job | None = None
        self._running: dict[Job, ReplayedRequest | None] = {}
        """None for a request that does not fit: it leaves nothing."""
        self._num_context_tokens = 0
        self._reports_load = reports_load
        self._load: tuple[WorkerLoad, float] | None = None
        """The last, and when it was so."""
        self._num_waiting_tokens = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=NUM_RECENT)
        """Tokens that were computed and all tokens, for each of the last prompts."""

    @property
    def is_prefilling(self) -> bool:
        """Whether nothing else can begin."""
        return self._prefilling is not None

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    def add(self, job: Job) -> None:
        """Queue a request."""
        self._waiting.append(job)
        self._num_waiting_tokens += job.request.num_prompt_tokens

    def begin(self, now_s: float) -> tuple[Job, int, float] | None:
        """Begin the next request, if it is its turn and there is room; its hit tokens and the seconds of its prefill.

        What nothing runs beside has room.
        """
        if self._prefilling is not None or not self._waiting:
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
            shared = job.ticket.decision.shared_tokens
            run.begin((shared,) if shared else ())
        hit, load_s = (0, 0.0) if run is None else (run.num_hit_tokens, run.load_s)
        self._running[job] = run
        self.num_requests += 1
        self.num_computed_tokens += request.num_prompt_tokens - hit
        self._num_waiting_tokens -= request.num_prompt_tokens
        self._recent.append((request.num_prompt_tokens - hit, request.num_prompt_tokens))
        self._prefilling = job
        if self._reports_load:
            self._load = self._read(), now_s
        return job, hit, load_s + self._speed.prefill.seconds(hit, request.num_prompt_tokens)

    def prefilled(self, job: Job, now_s: float) -> tuple[float, Batch | None]:
        """Note the first token of a request; the seconds of decoding that follow, and the events, if any."""
        request, run = job.request, self._running[job]
        self._prefilling = None
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

    def load_batch(self, now_s: float) -> Batch | None:
        """A batch with its load alone, as the prefill that runs began or, without one, now; None if it reports none."""
        if not self._reports_load:
            return None
        if self._prefilling is None or self._load is None:
            self._load = self._read(), now_s
        load, was_s = self._load
        return self._numbered((), replace(load, age_s=now_s - was_s))

    def _read(self) -> WorkerLoad:
        server, num_tokens, num_missing = self.server, 0, 0
        if self._waiting:
            num_computed, num_prompt = (
                (sum(each) for each in zip(*self._recent, strict=True)) if self._recent else (1, 1)
            )
            num_tokens = self._num_waiting_tokens * num_computed // num_prompt
        if self._prefilling is not None:
            num_tokens += self._recent[-1][0]
            run = self._running[self._prefilling]
            num_missing = 0 if run is None else run.missing.num_tokens
        pools, evictable = server.pools, server.evictable()
        num_short = max(num_missing - pools.num_free_tokens, 0)
        memory = FreeMemory(
            free_tokens=max(pools.num_free_tokens - num_missing, 0),
            evictable_tokens=max(evictable.num_tokens - num_short, 0),
            free_slots=pools.num_free_slots,
            evictable_slots=evictable.num_states,
        )
        return WorkerLoad(len(self._running), len(self._waiting), self._max_running, num_tokens, memory)

    def _batch(self, request: Request) -> Batch | None:
        """The tree's changes since the last batch as events, those of `request`'s path among them."""
        events = self._events.take(request.path)
        return self._numbered(events) if events else None

    def _numbered(self, events: tuple[Event, ...], load: WorkerLoad | None = None) -> Batch:
        self._num_batches += 1
        return Batch(self.name, 0, self._num_batches - 1, events, load)
