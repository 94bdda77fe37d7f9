"""A long random run of requests in flight together, under which nothing may be lost.

Requests of `workload.py` come faster than they are served, on pools that hold two or three of them; some are aborted
wherever they happen to be. Every few steps all memory is accounted for (`balance.py`); every step reads what it should
(`contents.py`). Every missed token has the cause that a history which forgets nothing gives it (`miss_oracle.py`).
Where the cache notes what its tree holds, its events leave just that (`events.py`). From time to time all of them are
let finish, and every other time the cache is flushed.

The same plan gives the same run, so a failure names its step.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from marconi.engine.launch.policies import PolicyChoice
from marconi.events.tree_log import Tenant, TreeLog
from rig.balance import check_balance
from rig.clock import TraceClock
from rig.events import EventCheck
from rig.miss_oracle import MissOracle
from rig.pools import Core, Division, HostPools, Strategy, marconi, stock
from rig.scheduler import HostScheduler
from rig.workload import NAMESPACES, Workload

MAX_WAITING = 5
ABORT_RATE = 0.01
"""Of steps, whatever is there,"""
ABORT_BETWEEN_CHUNKS_RATE = 0.05
"""and of steps between two chunks of a prefill."""
STEP_S = 0.05


class SoakFailure(Exception):
    """Something was lost, lent twice, or read by the wrong request."""


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """How long, and how closely watched."""

    num_requests: int
    seed: int
    check_every_steps: int = 32
    drain_every_requests: int = 120
    """So often all requests are let finish."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a plan without requests, or without checks."""
        numbers = {"requests": self.num_requests, "steps from check to check": self.check_every_steps}
        for name, number in numbers.items():
            if number < 1:
                raise ValueError(f"{name} must be 1 or more, got {number}")


def soak_pools(
    strategy: Strategy,
    page_tokens: int,
    num_rows: int = 6,
    num_kv_tokens: int = 480,
    memory: Division = Division.TWO_POOLS,
    host_ratio: float = 0.0,
) -> HostPools:
    """Pools that `num_rows` requests of a third to two thirds of them in length contend for."""
    num_slots = num_rows * (4 if strategy is Strategy.EXTRA_BUFFER else 2) + 2
    return HostPools(
        num_kv_tokens=num_kv_tokens,
        num_state_slots=num_slots,
        max_context_tokens=num_kv_tokens,
        page_tokens=page_tokens,
        strategy=strategy,
        chunk_tokens=64,
        num_rows=num_rows,
        track_tokens=64,
        memory=memory,
        host_ratio=host_ratio,
    )


class Soak:
    """Runs `plan` on `cache`, which was built on `host` with `clock`."""

    def __init__(self, cache: Any, host: HostPools, plan: SoakPlan, clock: TraceClock) -> None:
        self.scheduler = HostScheduler(cache, host)
        self.num_steps = self.num_checks = self.num_drains = self.num_flushes = self.num_submitted = 0
        self.origins: Counter[str] = Counter()
        self._plan = plan
        self._clock = clock
        self._events = None if getattr(cache, "log", None) is None else EventCheck(cache, starmap(Tenant, NAMESPACES))
        hybrid = getattr(cache.tree_core, "hybrid", None)
        self._misses = None if hybrid is None else MissOracle(hybrid)
        self._rng = random.Random(plan.seed)  # noqa: S311 - a workload, not a secret
        self._workload = Workload(self._rng, host.num_kv_tokens * 5 // 8)
        self._is_draining = False

    def run(self, progress: Callable[[int], Any] = lambda _: None) -> None:
        """Serve all requests; tells `progress` how many more came; raises `SoakFailure` at the first that fails."""
        try:
            while not self.is_done:
                num_before = self.num_submitted
                self.advance()
                progress(self.num_submitted - num_before)
            self._check()
        except Exception as error:
            raise SoakFailure(
                f"seed {self._plan.seed}, step {self.num_steps}, request {self.num_submitted}: "
                f"{type(error).__name__}: {error}"
            ) from error

    @property
    def is_done(self) -> bool:
        """Whether all requests came and went."""
        return self.num_submitted == self._plan.num_requests and self.scheduler.is_idle

    def advance(self) -> None:
        """A step, and what clients do before it."""
        scheduler = self.scheduler
        while not self._is_draining and self._wants_more():
            script = self._workload.next()
            self.origins[script.origin] += 1
            scheduler.submit(script)
            self.num_submitted += 1
            self._is_draining = self.num_submitted % self._plan.drain_every_requests == 0
        self._abort_some()
        did_something = scheduler.step()
        self.num_steps += 1
        self._clock.now_s += STEP_S
        assert did_something or scheduler.is_idle or scheduler.is_copying, "requests wait, and none is ever admitted"
        if self.num_steps % self._plan.check_every_steps == 0:
            self._check()
        if self._is_draining and scheduler.is_idle:
            self._rest()

    def _wants_more(self) -> bool:
        is_short = len(self.scheduler.waiting) < MAX_WAITING
        return is_short and self.num_submitted < self._plan.num_requests and self._rng.random() < 0.7

    def _abort_some(self) -> None:
        rng, scheduler = self._rng, self.scheduler
        if scheduler.chunked is not None and rng.random() < ABORT_BETWEEN_CHUNKS_RATE:
            scheduler.abort(scheduler.chunked)
        candidates = [*scheduler.waiting, *scheduler.in_flight()]
        if candidates and rng.random() < ABORT_RATE:
            scheduler.abort(rng.choice(candidates))

    def _rest(self) -> None:
        """Between two crowds."""
        self._is_draining = False
        self.num_drains += 1
        self._check()
        if self.num_drains % 4:
            self.scheduler.settle()
            self._check()
        if self.num_drains % 2 == 0:
            self.scheduler.flush()
            self.num_flushes += 1
            if self._misses is not None:
                self._misses.listen(self.scheduler.cache.tree_core.hybrid)
            self._check()

    def _check(self) -> None:
        self.num_checks += 1
        cache, in_flight = self.scheduler.cache, self.scheduler.in_flight()
        check_balance(cache, in_flight)
        if hasattr(cache, "waiting"):
            prompts = cache.waiting._prompts
            ended = (prompts.keys() | prompts.pending) - {*self.scheduler.waiting, *in_flight}
            assert not ended, f"{ended}: held, though SGLang has ended them"
        if self._events is not None:
            self._events.check()

    @property
    def num_events(self) -> int:
        """That the cache told, and that left what its tree holds; 0 where it notes nothing."""
        return 0 if self._events is None else self._events.num_events


def soak_on_marconi(
    host: HostPools, plan: SoakPlan, choice: PolicyChoice | None = None, log: TreeLog | None = None
) -> Soak:
    """Of our cache on new pools, by default with the policies of a server's default; its events are those of `log`."""
    clock = TraceClock()
    return Soak(marconi(host, choice or PolicyChoice("best"), host.costs, clock, log), host, plan, clock)


def soak_on_stock(host: HostPools, plan: SoakPlan) -> Soak:
    """Of SGLang's own cache on new pools."""
    return Soak(stock(host, Core.PYTHON), host, plan, TraceClock())
