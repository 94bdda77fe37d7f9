"""How fast each worker prefills beside the others: cards of a fleet may be unequal, their model is one.

    prefill on w       =  pace of w x prefill by the fleet's fit (`model.LearnedLatency`)
    pace of w          =  median of taken / fitted seconds, over the latest prefills on w
    the fit observes      taken seconds x median pace of all workers / pace of w

The shape of the fit, what is fixed and what grows with FLOPs, is learned from all workers. One of them may see prompts
of a single length, and a line through those says nothing of another length. One number is known after a few prefills.
The last formula keeps the fit that of a worker in the middle, whichever has the traffic.

The pace is 1, the fleet's own,

    until `MIN_OBSERVED` prefills of the worker were timed
    between 1 / `EQUAL` and `EQUAL`             a smaller difference may be noise, and equal workers are ranked as equal
    `FORGOTTEN_S` after its latest prefill      a worker that was slow for a while would get no request to show that
                                                it is slow no longer

Prefills that waited for room count for the fit alone: they say how busy their worker was. Owner: `Dispatcher`. A worker
that is removed and comes back may be another card: it begins anew.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

from marconi.model.learned_latency import LearnedLatency

MIN_OBSERVED: Final = 8
EQUAL: Final = 1.25
FORGOTTEN_S: Final = 300.0
_NUM_LATEST: Final = 16


class Timed(NamedTuple):
    """A request on its worker with no prefill ahead of it, and its time."""

    num_cached_tokens: int
    num_prompt_tokens: int
    seconds: float
    num_passes: int | None = None
    """Forward passes of a whole answer; None for a prefill, which was timed by itself."""
    waited_s: float = 0.0
    """The wait that was expected when it was dispatched."""


@dataclass(slots=True)
class _Seen:
    """The latest prefills of one worker, and its pace."""

    latest: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=_NUM_LATEST))
    """FLOPs, forward passes and seconds."""
    pace: float = 1.0
    last_s: float = 0.0
    """When the latest was observed."""


class Paces:
    """The pace of each worker; time is passed in, in seconds of any clock that does not decrease."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}
        self._fit = (0.0, 0.0)
        """Seconds of a forward pass and of a FLOP; 0 while they are not known."""

    def add_worker(self, worker: str) -> None:
        """Add a worker of which nothing was timed."""
        self._seen[worker] = _Seen()

    def remove_worker(self, worker: str) -> None:
        """Forget a worker; `KeyError` if it is not known."""
        del self._seen[worker]

    def of(self, worker: str, now_s: float) -> float:
        """The seconds that a worker's prefills take over those of the fleet's fit."""
        seen = self._seen[worker]
        return seen.pace if seen.pace == 1.0 or now_s - seen.last_s < FORGOTTEN_S else 1.0

    def observe(self, latency: LearnedLatency, worker: str, timed: Timed, now_s: float) -> None:
        """Take a timed request into account, in the fit and, unless its worker was removed, in the worker's pace."""
        lengths, seen = timed[:2], self._seen.get(worker)
        usual_s = timed.seconds
        if seen is not None:
            usual_s *= median(each.pace for each in self._seen.values()) / seen.pace
        if timed.num_passes is None:
            latency.observe(*lengths, usual_s)
        else:
            latency.observe_whole(*lengths, timed.num_passes, usual_s)
        self._follow((latency.overhead_s, latency.s_per_flop))
        if seen is not None and timed.seconds > 0 and not timed.waited_s:
            if now_s - seen.last_s >= FORGOTTEN_S:
                seen.latest.clear()
            seen.latest.append((latency.flops(*lengths), timed.num_passes or 1, timed.seconds))
            seen.last_s = now_s
            self._measure(seen)

    def _follow(self, fit: tuple[float, float]) -> None:
        """Measure all workers by another fit: a pace says nothing without the one that it belongs to."""
        if fit != self._fit:
            self._fit = fit
            for seen in self._seen.values():
                self._measure(seen)

    def _measure(self, seen: _Seen) -> None:
        pass_s, s_per_flop = self._fit
        if len(seen.latest) < MIN_OBSERVED or not s_per_flop:
            seen.pace = 1.0
            return
        ratio = median(seconds / (passes * pass_s + s_per_flop * flops) for flops, passes, seconds in seen.latest)
        seen.pace = 1.0 if 1 / EQUAL < ratio < EQUAL else ratio
