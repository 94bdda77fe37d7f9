"""Queueing replay: requests arrive when they arrive, wait, are prefilled, and decode beside each other.

One device does one thing at a time, as SGLang 0.5.23 does without mixed chunks (`managers/scheduler.py`): as long as
requests wait and there is room, it prefills, first come, first served; else it decodes a step for all that run.

    start     what waits for no state and can run to its end beside the others: match, lock, plan (`server.py`)
    prefill   all that start together, up to `max_prefill_tokens` uncached tokens; at its end their states join the tree
              and their first tokens come
    decode    one token a step for each; steps between two events are summed in closed form (`decode.py`)
    finish    the last state joins the tree, and memory is given back

The time to first token runs from arrival to the end of the prefill. For admissions that plan ahead the queue has its
say (`policy/waiting.py`): who shares enough with a prompt that starts waits for the states where others leave it, and
the states that those who wait would start from are evicted last. A request that does not fit even alone runs alone,
and leaves nothing.

Arrivals are open-loop, at their recorded times however late the answers before them are: the trace of a fleet overloads
one device. Events are ordered by time, then by arrival: nothing depends on the machine.
"""

import heapq
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

from marconi.lifecycle.queue import Queue
from marconi.model.latency import LatencyModel
from marconi.policy.request import Request, Trace
from marconi.replay.decode import DecodeLatency
from marconi.replay.outcome import Outcome, Progress
from marconi.replay.server import ReplayedRequest, ServerReplay
from marconi.replay.target import ReplayTarget


@dataclass(frozen=True, slots=True)
class Batching:
    """How many requests run beside each other. `ValueError` for a limit below 1."""

    max_running: int = 256
    max_prefill_tokens: int = 16384
    """Uncached tokens of one prefill; a longer request is prefilled alone."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Speed:
    """How long things take."""

    prefill: LatencyModel
    decode: DecodeLatency


class _Running(NamedTuple):
    """Ordered by the decode step after which it is done, then by arrival."""

    last_step: int
    position: int
    """Position in the trace."""
    request: Request
    run: ReplayedRequest | None
    """None for a request that does not fit."""


def replay(
    trace: Trace, target: ReplayTarget, speed: Speed, batching: Batching, progress: Progress | None = None
) -> Outcome:
    """Serve every request of `trace`, each once; `ValueError` for a cache of blocks, which locks nothing."""
    if not isinstance(target, ServerReplay):
        raise ValueError("--mode must be serial for a block cache, got queueing")
    start_s = time.perf_counter()
    loop = _Loop(trace, target, speed, batching, progress)
    while loop.advance():
        pass
    return Outcome(loop.hit_tokens, loop.ttft_s, loop.prefill_s, time.perf_counter() - start_s)


@dataclass(slots=True)
class _Loop:
    trace: Trace
    server: ServerReplay
    speed: Speed
    batching: Batching
    progress: Progress | None
    hit_tokens: list[int] = field(init=False)
    ttft_s: list[float] = field(init=False)
    max_running: int = field(init=False)
    now_s: float = 0.0
    prefill_s: float = 0.0
    num_arrived: int = 0
    queue: list[int] = field(default_factory=list)
    """Positions in the trace of what has arrived and waits."""
    waiting: Queue = field(init=False)
    num_steps: int = 0
    num_context_tokens: int = 0
    """Context tokens of all that run."""
    running: list[_Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        server = self.server
        self.hit_tokens = [0] * len(self.trace.requests)
        self.ttft_s = [0.0] * len(self.trace.requests)
        self.waiting = Queue(server.hybrid)
        self.max_running = server.run_together(self.batching.max_running)

    def advance(self) -> bool:
        """Do what comes next; False when every request has finished."""
        following = self._following()
        if following is None and not self.running and not self.queue:
            return False
        if following is not None and not self.running and not self.queue:
            self.now_s = max(self.now_s, following.arrival_s)
        self._arrive()
        started = self._start()
        if started:
            self._prefill(started)
        else:
            self._decode()
        return True

    def _following(self) -> Request | None:
        """The request that arrives next."""
        requests = self.trace.requests
        return requests[self.num_arrived] if self.num_arrived < len(requests) else None

    def _arrive(self) -> None:
        """Move the requests that have arrived by now to the queue."""
        came = list[tuple[int, Request]]()
        while (request := self._following()) is not None and request.arrival_s <= self.now_s:
            came.append((self.num_arrived, request))
            self.num_arrived += 1
        self.queue += [position for position, _ in came]
        if self.server.hybrid.admission.plans_ahead:
            self.waiting.come(came)

    def _start(self) -> list[_Running]:
        """Start what waits, in order, as far as there is room; what waits for a state is passed over."""
        started: list[_Running] = []
        num_uncached = 0
        for position in list(self.queue):
            request = self.trace.requests[position]
            match = self.server.hybrid.match(request)
            self.waiting.rematch(position, match)
            runs = bool(self.running or started)
            if runs and self.waiting.prompts.waits(request, match):
                continue
            num_uncached += request.num_prompt_tokens - match.checkpoint.depth
            if runs and not (
                len(self.running) + len(started) < self.max_running
                and (not started or num_uncached <= self.batching.max_prefill_tokens)
                and self.server.has_room(request, match, [each.run for each in (*self.running, *started) if each.run])
            ):
                break
            started.append(_Running(0, position, request, self._begin(position, request)))
            self.queue.remove(position)
        return started

    def _begin(self, position: int, request: Request) -> ReplayedRequest | None:
        """Begin a request and say what waits for it; None if it does not fit."""
        server, prompts, run = self.server, self.waiting.prompts, None
        shared = prompts.shared(position, 0)
        if position in prompts:
            self.waiting.go([position])
        if server.fits(request):
            run = server.run(request, self.now_s)
            plan = run.begin([depth for depth in shared if depth > run.num_hit_tokens])
            self.hit_tokens[position] = run.num_hit_tokens
            if server.hybrid.admission.plans_ahead:
                prompts.expect(position, run.lease.request, plan.depths)
        else:
            server.refuse(request)
        return run

    def _prefill(self, started: list[_Running]) -> None:
        for _, position, request, run in started:
            prefill_s = self.speed.prefill.seconds(self.hit_tokens[position], request.num_prompt_tokens)
            prefill_s += 0.0 if run is None else run.load_s
            self.prefill_s += prefill_s
            self.now_s += prefill_s
        for each in started:
            request = each.request
            if each.run is not None:
                each.run.now_s = self.now_s
                each.run.prefill()
                self.waiting.prompts.expect_nothing(each.position)
            self.ttft_s[each.position] = self.now_s - request.arrival_s
            num_left = request.num_processed_tokens - request.num_prompt_tokens
            if num_left:
                heapq.heappush(self.running, each._replace(last_step=self.num_steps + num_left))
                self.num_context_tokens += request.num_prompt_tokens
            else:
                self._finish(each)

    def _decode(self) -> None:
        """Decode until something finishes or arrives."""
        num_running, num_context = len(self.running), self.num_context_tokens
        num_steps = self.running[0].last_step - self.num_steps
        following = self._following()
        if following is not None and following.arrival_s > self.now_s:
            gap_s = following.arrival_s - self.now_s
            steps = range(1, num_steps)
            num_steps = 1 + bisect_left(
                steps, gap_s, key=lambda count: self.speed.decode.seconds(num_running, num_context, count)
            )
        self.now_s += self.speed.decode.seconds(num_running, num_context, num_steps)
        self.num_steps += num_steps
        self.num_context_tokens += num_running * num_steps
        while self.running and self.running[0].last_step == self.num_steps:
            done = heapq.heappop(self.running)
            self.num_context_tokens -= done.request.num_processed_tokens
            self._finish(done)
        self.server.end_steps(num_steps, self.now_s)

    def _finish(self, done: _Running) -> None:
        if done.run is not None:
            done.run.now_s = self.now_s
            done.run.decode()
            done.run.finish()
        if self.progress is not None:
            self.progress(1)
