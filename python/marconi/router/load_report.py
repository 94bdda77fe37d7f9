"""The load that a worker reports, and what is left of it without this router's requests: the load of other clients.

    ours      at the report's moment  =  what this router has there now, less what it began and plus what ended since
    others    requests                 =  running and waiting, less ours
              prefill tokens           =  those reported, less those of ours that were not answered

Neither is below 0. So each of this router's requests counts once, as its own: one that was sent after that moment, or
had not reached the worker by then, is not lost, and one that is in the report is not counted twice. Where the worker
is found to hold less than this router sent, others count as nothing until the next report.

A report holds for `fresh_s` after it arrived, and counts for less and less over as long again; then its worker's load
is what this router knows by itself. Times are of the router's clock: a worker says how old its report is.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeGuard

from marconi.events.base import StoreReach, WorkerLoad

_HISTORY_S: Final = 60.0
"""How far back this router remembers what it sent."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's load at one moment."""

    load: WorkerLoad
    made_s: float
    """The moment that it describes."""
    received_s: float
    fresh_s: float
    sequence: int | None = None
    """The number of its batch; None where the worker was asked."""

    @property
    def ends_s(self) -> float:
        """The time from which on it counts for nothing."""
        return self.received_s + 2 * self.fresh_s

    def weight(self, now_s: float) -> float:
        """How much it counts: 1 while it is fresh, then falling to 0."""
        return min(max((self.ends_s - now_s) / self.fresh_s, 0.0), 1.0)


class _Change(NamedTuple):
    """A change of what this router has on a worker."""

    at_s: float
    num_requests: int
    num_tokens: int
    """Prompt tokens to compute, of requests that are not answered."""


@dataclass(slots=True)
class Others:
    """The load of other clients on one worker, and the memory that it has left."""

    _changes: deque[_Change] = field(default_factory=deque)
    """Those of the last `_HISTORY_S`, in order."""
    _num_requests: int = 0
    """This router's own, now."""
    _num_tokens: int = 0
    """Theirs to compute."""
    _last: LoadReport | None = None
    _num_others: int = 0
    """Requests of others, when the report was made."""
    _prefill_s: float = 0.0
    """Seconds of their prefills then."""
    _num_since: int = 0
    """Requests that this router has sent since."""
    _tokens_since: int = 0
    """Theirs to compute."""

    def note(self, now_s: float, num_requests: int, num_tokens: int) -> None:
        """Add `num_requests` and `num_tokens` to compute, negative as they end, to this router's own on the worker."""
        self._num_requests += num_requests
        self._num_tokens += num_tokens
        if num_requests > 0:
            self._num_since += num_requests
            self._tokens_since += num_tokens
        self._changes.append(_Change(now_s, num_requests, num_tokens))
        while self._changes[0].at_s < now_s - _HISTORY_S:
            self._changes.popleft()

    def is_news(self, report: LoadReport | None) -> TypeGuard[LoadReport]:
        """True for a report that has not been applied yet."""
        return report is not None and report is not self._last

    def update(self, report: LoadReport, seconds: Callable[[int, int], float], pace: float = 1.0) -> None:
        """Apply the worker's last report.

        `seconds` gives the prefill of a prompt from cached tokens on, `pace` how many times as long this worker takes.
        """
        self._last = report
        num_ours, our_tokens = self._num_requests, self._num_tokens
        self._num_since = self._tokens_since = 0
        for at_s, num_requests, num_tokens in reversed(self._changes):
            if at_s <= report.made_s:
                break
            num_ours -= num_requests
            our_tokens -= num_tokens
            if num_requests > 0:
                self._num_since += num_requests
                self._tokens_since += num_tokens
        load = report.load
        self._num_others = max(load.num_running + load.num_waiting - num_ours, 0)
        num_tokens = max(load.num_prefill_tokens - our_tokens, 0)
        # Of several prompts together a prefill would be longer than all of theirs.
        num_prompts = max(min(load.num_waiting, self._num_others), 1)
        self._prefill_s = pace * num_prompts * seconds(0, math.ceil(num_tokens / num_prompts)) if num_tokens else 0.0

    def load(self, now_s: float) -> WorkerLoad | None:
        """The load that the worker reported, as long as it counts."""
        report = self._last
        return report.load if report is not None and now_s < report.ends_s else None

    @property
    def max_running(self) -> int | None:
        """The limit that the worker reported last, however long ago: it is a setting of the worker's; None before."""
        return None if self._last is None else self._last.load.max_running

    @property
    def store(self) -> StoreReach | None:
        """The store that the worker reported last, however long ago; None before, or where it has none."""
        return None if self._last is None else self._last.load.store

    def num_requests(self, now_s: float) -> float:
        """Requests of others."""
        report = self._last
        return self._num_others * report.weight(now_s) if report is not None and self._num_others else 0.0

    def prefill_s(self, now_s: float, ours_s: float) -> float:
        """Seconds of others' prefills ahead, where the last `ours_s` seconds were spent on this router's own."""
        report = self._last
        if report is None or not self._prefill_s:
            return 0.0
        done_s = max(now_s - report.made_s - ours_s, 0.0)
        return max(self._prefill_s - done_s, 0.0) * report.weight(now_s)

    def has_room(self, num_tokens: int, now_s: float) -> bool:
        """True unless the worker must end a request before one of `num_tokens` new ones fits its memory."""
        load = self.load(now_s)
        memory = None if load is None else load.memory
        return memory is None or (
            memory.free_tokens + memory.evictable_tokens >= num_tokens + self._tokens_since
            and memory.free_slots + memory.evictable_slots > self._num_since
        )

    def check_invariants(self, num_requests: int, num_tokens: int) -> None:
        """Raise `AssertionError` where counts are not those of this router's requests."""
        assert (self._num_requests, self._num_tokens) == (num_requests, num_tokens)
