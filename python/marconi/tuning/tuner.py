"""Tunes one parameter of an eviction rule while it serves (Marconi, section 4.3).

    bootstrap   value 0 (recency alone) until the cache first evicts: before that every value does the same
    window      the real tree is snapshot, then as many requests are observed as it takes to turn the cache over: a
                multiple (the paper's 5 to 15) of what came before the first eviction, within bounds
    trials      the window is replayed from its snapshot under each value of a grid and under a reference rule, LRU as
                the field means it, away from the serving path
    adoption    see `choice.py`
    again       the next window begins with a snapshot of the tree as it then is, so the value follows the traffic

Who serves calls `observe` for every request once it is finished, at the cost of one append, and `poll` when it has a
moment, outside of any request: `poll` takes the snapshot (some microseconds a node, once a window), hands windows over
and picks results up, and never waits for a trial. Trials that fail cost their window and nothing else.

What differs from the paper, whose published code tunes once, on the last requests of one window that starts from an
empty tree: windows follow each other, start from the real tree and count whole, and what a window shows must last. A
window's horizon ends with it: a value that fills memory with what never returns looks good until then, and it is the
next window, which starts from the memory so filled, that shows the price and leads back to 0.
"""

import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from marconi.policy.request import Request
from marconi.tree.snapshot import TreeSnapshot
from marconi.tuning.choice import LRU, choose
from marconi.tuning.live import Tunable
from marconi.tuning.schedule import Schedule
from marconi.tuning.trial import Setup, Trial
from marconi.tuning.window import pack_window
from marconi.tuning.workers import Workers

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision after one window."""

    num_requests: int
    """Requests that had been observed when it was taken."""
    previous: float
    value: float
    """What the cache goes on with."""
    scores: Mapping[float, float]
    """Score by value, values rising; empty if the trials failed."""
    reference_score: float | None = None
    """Score of the reference rule, if there is one; no value that scores less is adopted or kept, but 0."""
    failure: str = ""
    """Why there are no trials."""


class Tuner:
    """Chooses the value of a live rule's parameter, again and again."""

    def __init__(self, live: Tunable, setup: Setup, workers: Workers, schedule: Schedule | None = None) -> None:
        self.value = LRU
        """What the cache runs with."""
        self._schedule = schedule or Schedule()
        self._live = live
        self._setup = setup
        self._workers = workers
        self._values = (*((None,) if setup.reference else ()), *sorted(set(self._schedule.grid)))
        self._num_requests = 0
        self._num_window = 0
        self._num_path_bytes = 0
        self._snapshot: TreeSnapshot | None = None
        """The tree at the window's start; None while there is no window."""
        self._requests: list[Request] = []
        self._running: list[Future[list[Trial]]] = []
        self._scores: deque[dict[float, float]] = deque(maxlen=self._schedule.num_remembered)
        self._is_closed = False
        live.apply(LRU)

    def observe(self, request: Request) -> None:
        """`request` has been served and is finished; its `arrival_s` is by the clock of the tree."""
        self._num_requests += 1
        if self._snapshot is not None and not self._is_full:
            self._requests.append(request)
            self._num_path_bytes += len(request.path)

    def poll(self) -> Decision | None:
        """Take the next step, if there is one; the decision, if trials came to an end."""
        decision = self._collect() if self._running and all(future.done() for future in self._running) else None
        if self._snapshot is None:
            if self._live.has_evicted and not self._is_closed:
                self._num_window = self._schedule.num_window_requests(self._num_requests)
                self._snapshot = self._live.snapshot()
        elif self._is_full and not self._running:
            self._hand_over(self._snapshot)
            self._snapshot = self._live.snapshot()
        return decision

    def close(self) -> None:
        """Give the current window and its trials up and end the workers; the last value stays."""
        self._is_closed = True
        self._workers.close()
        self._running = []
        self._requests = []
        self._snapshot = None

    @property
    def _is_full(self) -> bool:
        """True if the window is over; it waits for the trials of the one before."""
        return len(self._requests) >= self._num_window or self._num_path_bytes >= self._schedule.max_path_bytes

    def _hand_over(self, snapshot: TreeSnapshot) -> None:
        window = pack_window(snapshot, self._requests)
        self._requests = []
        self._num_path_bytes = 0
        try:
            self._running = self._workers.submit(window, self._setup, self._values)
        except Exception as error:
            failed: Future[list[Trial]] = Future()
            failed.set_exception(error)
            self._running = [failed]

    def _collect(self) -> Decision:
        running, self._running = self._running, []
        previous = self.value
        try:
            found: dict[float | None, float] = dict(trial for future in running for trial in future.result())
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            _log.warning("tuning: the trials of a window failed, %s goes on: %s", previous, failure)
            return Decision(self._num_requests, previous, previous, {}, failure=failure)
        reference_score = found.get(None)
        scores = {value: found[value] for value in self._values if value is not None}
        self._scores.append(scores)
        self.value = choose(self._scores, previous, self._schedule.margin, self._schedule.caution, reference_score)
        if self.value != previous:
            self._live.apply(self.value)
        return Decision(self._num_requests, previous, self.value, scores, reference_score)
