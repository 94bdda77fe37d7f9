"""Queueing replay: requests arrive when they arrive, wait, are prefilled, and decode beside each other.

One device does one thing at a time, as SGLang 0.5.23 does without mixed chunks (`managers/scheduler.py`): as long as
requests wait and there is room, it prefills, first come, first served; else it decodes a step for all that run.

    start     what waits for no state: match, lock the state it starts from, set its own memory aside (`room.py`)
    prefill   all that start together, up to `max_prefill_tokens` uncached tokens; their first tokens come at its end
    decode    one token a step for each; steps between two events are summed in closed form (`decode.py`)
    finish    unlock, give the memory back, leave its states, evict

The time to first token runs from arrival to the end of the prefill. States become visible when their request finishes,
but for those where others that waited leave its prompt: who shares enough of it waits for the prefill's end, and others
go first (`policy/waiting.py`, for admissions that look at the queue). A server shows the other states of a prompt at
that time, too, so requests that run beside each other share less here.
Arrivals are open-loop, at their recorded times however late the answers before them are: the trace of a fleet overloads
one device. Events are ordered by time, then by arrival: nothing depends on the machine.
"""

import heapq
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from marconi.model.latency import LatencyModel
from marconi.policy.admission.base import num_processed_tokens
from marconi.policy.admission.prefill import MAX_SHARED
from marconi.policy.lease import Lease
from marconi.policy.request import Request, Trace
from marconi.policy.waiting import WaitingPrompts
from marconi.replay.decode import DecodeLatency
from marconi.replay.outcome import Outcome, Progress
from marconi.replay.policies import Subject
from marconi.replay.policies.cache import ReplayCache
from marconi.replay.room import Claim, Room


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
    """In the trace."""
    lease: Lease
    claim: Claim
    shared: Sequence[int] = ()
    """Depths of the states that others wait for."""


def replay(
    trace: Trace, subject: Subject, speed: Speed, batching: Batching, progress: Progress | None = None
) -> Outcome:
    """Serve every request of `trace`, each once; `ValueError` for a cache of blocks, which locks nothing."""
    if not isinstance(subject.cache, ReplayCache):
        raise ValueError("a block cache cannot be replayed in queueing mode: take --mode serial")
    start_s = time.perf_counter()
    loop = _Loop(trace, subject, subject.cache, speed, batching, progress)
    while loop.advance():
        pass
    return Outcome(loop.hit_tokens, loop.ttft_s, time.perf_counter() - start_s)


@dataclass(slots=True)
class _Loop:
    trace: Trace
    subject: Subject
    cache: ReplayCache
    speed: Speed
    batching: Batching
    progress: Progress | None
    hit_tokens: list[int] = field(init=False)
    ttft_s: list[float] = field(init=False)
    room: Room = field(init=False)
    now_s: float = 0.0
    num_arrived: int = 0
    queue: list[int] = field(default_factory=list)
    """Positions in the trace of what has arrived and waits."""
    waiting: WaitingPrompts = field(init=False)
    num_steps: int = 0
    num_context_tokens: int = 0
    """Of all that run."""
    running: list[_Running] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hit_tokens = [0] * len(self.trace.requests)
        self.ttft_s = [0.0] * len(self.trace.requests)
        self.room = Room(self.cache)
        self.waiting = WaitingPrompts(self.cache.tree.unit_tokens)

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
        """What arrives next."""
        requests = self.trace.requests
        return requests[self.num_arrived] if self.num_arrived < len(requests) else None

    def _arrive(self) -> None:
        """What has arrived by now waits."""
        while (request := self._following()) is not None and request.arrival_s <= self.now_s:
            self.queue.append(self.num_arrived)
            if self.cache.admission.looks_at_queue and not self.waiting.is_full:
                self.waiting.add(self.num_arrived, request)
            self.num_arrived += 1

    def _start(self) -> list[_Running]:
        """Start what waits, in order, as far as there is room; what waits for a state is passed over."""
        started: list[_Running] = []
        num_uncached = 0
        for position in list(self.queue):
            request = self.trace.requests[position]
            match = self.cache.match(request)
            if (self.running or started) and self.waiting.waits(request, match):
                continue
            source = match.checkpoint
            claim = self.room.claim(request, source.depth)
            num_uncached += request.num_prompt_tokens - source.depth
            in_use = [source, *(each.lease.match.checkpoint for each in (*self.running, *started))]
            if (self.running or started) and not (
                len(self.running) + len(started) < self.batching.max_running
                and (not started or num_uncached <= self.batching.max_prefill_tokens)
                and self.room.has(claim, in_use)
            ):
                break
            lease = self.cache.begin(request, self.now_s)
            self.room.take(claim, self.now_s)
            started.append(_Running(0, position, lease, claim, self._shared(position, lease)))
            self.queue.remove(position)
        return started

    def _shared(self, position: int, lease: Lease) -> Sequence[int]:
        """Where others that wait leave the prompt of one that starts; they may wait for it from now on."""
        unit_tokens, request = self.cache.tree.unit_tokens, lease.request
        last = (request.num_prompt_tokens - 1) // unit_tokens * unit_tokens
        deepest = self.waiting.shared(position, lease.match.checkpoint.depth)[:MAX_SHARED]
        depths = sorted({min(depth, last) for depth in deepest if min(depth, last) > lease.match.checkpoint.depth})
        self.waiting.expect(position, request, depths)
        if position in self.waiting:
            self.waiting.remove(position)
        return depths

    def _prefill(self, started: list[_Running]) -> None:
        for _, position, lease, _, _ in started:
            hit, prompt = lease.match.checkpoint.depth, lease.request.num_prompt_tokens
            self.hit_tokens[position] = hit
            self.now_s += self.speed.prefill.seconds(hit, prompt)
        for each in started:
            request = each.lease.request
            if each.shared:
                self.cache.leave(each.lease, each.shared, self.now_s)
                self.waiting.expect_nothing(each.position)
            self.ttft_s[each.position] = self.now_s - request.arrival_s
            num_left = num_processed_tokens(request) - request.num_prompt_tokens
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
            self.num_context_tokens -= num_processed_tokens(done.lease.request)
            self._finish(done)

    def _finish(self, done: _Running) -> None:
        self.room.give_back(done.claim)
        self.cache.finish(done.lease, self.now_s)
        if self.subject.served is not None:
            self.subject.served(done.lease.request, self.now_s)
        if self.progress is not None:
            self.progress(1)
