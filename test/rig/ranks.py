"""Ranks that share a cache: each with its own tree, pools and clocks, together only by what is broadcast.

    every pass    rank 0 makes a tick if one is due; a copy of it reaches every rank, through `TickReceiver`
    every step    the same requests, aborts and flushes on all ranks (`soak.py`), each by its own copy of the plan
    every eighth  digests of all ranks are equal after it (`digest.py`), or `RanksParted` names that step

While a rank runs, the machine's clocks are its own: they stand somewhere else than the others', jump, and no two
readings agree.
"""

import pickle
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from marconi.engine.launch.policies import PolicyChoice
from marconi.policy.base import Costs
from rig.digest import digest_of_policies, digest_of_step
from rig.pools import HostPools, marconi_rank
from rig.soak import Soak, SoakPlan

if TYPE_CHECKING:
    from marconi.engine.cache.tick import TickReceiver

COMPARED_EVERY_STEPS = 8
"""Ranks that have parted do not meet again."""
ALL_EVERY_STEPS = 64
"""So often the digest is of everything, else of what is held and who goes next."""
_CLOCKS = ("monotonic", "perf_counter", "time")


class RanksParted(Exception):
    """Two ranks decided differently."""


class DriftingClock:
    """Seconds that never go back, and jump: by up to an hour now and then."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
        self._now_s = self._rng.uniform(0, 1e5)

    def __call__(self) -> float:
        """Later than before."""
        rng = self._rng
        self._now_s += rng.uniform(0, 3600) if rng.random() < 1e-3 else rng.expovariate(20)
        return self._now_s


@dataclass(frozen=True, slots=True)
class _Rank:
    soak: Soak
    clock: DriftingClock
    receiver: "TickReceiver"
    channel: SimpleNamespace
    """SGLang's receiver, as far as ours asks it: `sent` is what this rank would broadcast, `arrived` what came."""


class Ranks:
    """`num_ranks` of them, for one plan."""

    def __init__(self, num_ranks: int, host: HostPools, choice: PolicyChoice, costs: Costs, plan: SoakPlan) -> None:
        self.num_ticks = 0
        self.ranks = [self._rank(index, host, choice, costs, plan) for index in range(num_ranks)]

    def _rank(self, index: int, host: HostPools, choice: PolicyChoice, costs: Costs, plan: SoakPlan) -> _Rank:
        from marconi.engine.cache.tick import FirstRank, TickReceiver

        clock = DriftingClock(1000 * plan.seed + index)
        first_rank = FirstRank(clock, costs.flops) if index == 0 else None
        cache = marconi_rank(host, choice, costs, first_rank)
        channel = SimpleNamespace(sent=[], arrived=[])

        def receive(local_reqs: list[Any] | None) -> list[Any]:
            channel.sent = local_reqs or []
            return pickle.loads(pickle.dumps(channel.arrived or channel.sent))  # noqa: S301 - SGLang's own way

        channel.recv_requests = receive
        soak = Soak(cache, host, replace(plan), SimpleNamespace(now_s=0.0))  # type: ignore[arg-type]
        return _Rank(soak, clock, TickReceiver(channel, cache), channel)

    @property
    def caches(self) -> list[Any]:
        """Of all ranks, the first one's first."""
        return [rank.soak.scheduler.cache for rank in self.ranks]

    @property
    def is_done(self) -> bool:
        """Whether all requests came and went."""
        return self.ranks[0].soak.is_done

    def run(self, progress: Callable[[int], Any] = lambda _: None) -> None:
        """Serve all requests on all ranks; raises `RanksParted` where they part."""
        while not self.is_done:
            num_before = self.ranks[0].soak.num_submitted
            self.advance()
            progress(self.ranks[0].soak.num_submitted - num_before)
        self._compare()

    def advance(self) -> None:
        """A pass of every rank's scheduler."""
        first, *others = self.ranks
        with machine_time(first.clock):
            first.receiver.recv_requests(local_reqs=[])
        self.num_ticks += len(first.channel.sent)
        for other in others:
            other.channel.arrived = first.channel.sent
            with machine_time(other.clock):
                other.receiver.recv_requests(local_reqs=None)
        for rank in self.ranks:
            with machine_time(rank.clock):
                rank.soak.advance()
        if self.ranks[0].soak.num_steps % COMPARED_EVERY_STEPS == 0:
            self._compare()

    def _compare(self) -> None:
        num_steps = self.ranks[0].soak.num_steps
        kinds: list[Callable[[Soak], str]] = [lambda soak: digest_of_step(soak.scheduler.cache, soak.scheduler)]
        if num_steps % ALL_EVERY_STEPS == 0:
            kinds.append(lambda soak: digest_of_policies(soak.scheduler.cache))
        for digest in kinds:
            first, *others = [digest(rank.soak) for rank in self.ranks]
            for index, other in enumerate(others, 1):
                if other != first:
                    num_requests = self.ranks[0].soak.num_submitted
                    raise RanksParted(f"rank {index} parted from rank 0 by step {num_steps}, request {num_requests}")


@contextmanager
def machine_time(clock: DriftingClock) -> Iterator[None]:
    """Let the machine's clocks be `clock`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in _CLOCKS:
            patch.setattr(time, name, clock)
        yield
