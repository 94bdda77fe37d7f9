"""Ticks: time and latency of the first rank, by which all ranks that share its cache decide.

    first rank    FirstRank.due       every 10 ms at most: time, how long its prefills take
    all ranks     TickReceiver        the tick travels in SGLang's own broadcast of requests, as an abort that one rank
                                      decided on does, and is adopted before a request of the same pass is seen

Ranks run the same steps on the same requests, each on a tree of its own, and must evict the same victims. So no
decision reads what one rank alone knows: between two ticks the cache's time stands still, and the learned latency is
what the last tick brought. One rank does as many do.

Sessions time out by the tick as well: by each rank's own clock, as in stock, a request finds its session on one rank
and not on the next.

The first rank is the one from which SGLang broadcasts requests: its ranks of pipeline, attention's tensor and context
parallelism are all 0 (`managers/scheduler_components/request_receiver.py`).

Owner: the scheduler's thread.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from sglang.srt.session import session_controller

from marconi.engine.cache.scheduler import ServedRequest
from marconi.engine.faults import Faults
from marconi.model.learned_latency import LearnedLatency

INTERVAL_S: Final = 0.01
"""Least time between two ticks."""

Clock = Callable[[], float]
"""Seconds that never decrease."""


class Tick(NamedTuple):
    """Time, and what was learned, until the next one."""

    now_s: float
    overhead_s: float = 0.0
    s_per_flop: float = 0.0
    """Coefficients of `LearnedLatency`."""
    plans: bool = True
    """False once a hook has failed or nobody has written what was planned: no more states are (`faults.py`)."""


REQUEST_S: Final = 0.25
"""Seconds that each request advances a clock driven by requests alone."""


class RequestClock:
    """A quarter of a second for each request that has begun (`MARCONI_TIME=requests`)."""

    def __init__(self) -> None:
        self.num_begun = 0

    def __call__(self) -> float:
        """The time, in seconds."""
        return REQUEST_S * self.num_begun


class FirstRank:
    """The rank that acts for all that share its cache: it reads the clock and times prefills."""

    def __init__(self, clock: Clock, flops: Callable[[int], float]) -> None:
        """`flops` returns the FLOPs of a prefill, by its number of tokens."""
        self.clock = clock
        self.latency = LearnedLatency(flops)
        self.faults = Faults()
        self._ticked_s = -INTERVAL_S

    def due(self) -> Tick | None:
        """The next tick; None where the last one is less than `INTERVAL_S` old."""
        now_s = self.clock()
        return self.tick(now_s) if now_s - self._ticked_s >= INTERVAL_S else None

    def tick(self, now_s: float) -> Tick:
        """The tick at `now_s`, of this rank's clock."""
        self._ticked_s = now_s
        return Tick(now_s, self.latency.overhead_s, self.latency.s_per_flop, self.faults.first is None)

    def began(self, run: ServedRequest) -> None:
        """A request's prefill begins."""
        if isinstance(self.clock, RequestClock):
            # It says nothing of how long a prefill takes.
            self.clock.num_begun += 1
        else:
            run.began_s = self.clock()

    def prefilled(self, run: ServedRequest, up_to: int) -> None:
        """A request has computed `up_to` tokens: from the first time that this is all of its prompt, learn."""
        request, match = run.lease
        if run.began_s is not None and up_to >= request.num_prompt_tokens:
            self.latency.observe(match.checkpoint.depth, request.num_prompt_tokens, self.clock() - run.began_s)
            run.began_s = None


class TickReceiver:
    """SGLang's receiver of requests, whose broadcast carries ticks as well."""

    def __init__(self, receiver: Any, cache: Any) -> None:
        """`receiver` is a `SchedulerRequestReceiver`, `cache` a `MarconiRadixCache`."""
        self._receiver = receiver
        self._cache = cache

    def recv_requests(self, local_reqs: list[Any] | None = None) -> list[Any]:
        """Receive as SGLang does; a tick among what came is adopted and taken out."""
        first_rank = self._cache.first_rank
        tick = None if first_rank is None else first_rank.due()
        if tick is not None:
            local_reqs = [*(local_reqs or ()), tick]
        received: list[Any] = self._receiver.recv_requests(local_reqs=local_reqs)
        for each in received:
            if isinstance(each, Tick):
                self._cache.adopt(each)
                return [other for other in received if not isinstance(other, Tick)]
        return received


def after_init_request_receiver(_result: None, scheduler: Any) -> None:
    """After `Scheduler.init_request_receiver`: with a cache of ours, what is received brings ticks."""
    cache = scheduler.tree_cache
    if hasattr(cache, "adopt"):
        scheduler.request_receiver = TickReceiver(scheduler.request_receiver, cache)
        session_controller.time = SimpleNamespace(monotonic=cache.clock)


def around_maybe_reap(maybe_reap: Callable[..., None], controller: Any, now: float, interval: float = 1.0) -> None:
    """Around `SessionController.maybe_reap`: sessions end at a tick."""
    clock = getattr(controller.tree_cache, "clock", None)
    maybe_reap(controller, now if clock is None else clock(), interval)
