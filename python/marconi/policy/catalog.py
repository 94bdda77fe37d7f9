"""Every policy, an entry each: what it is, what it takes, what it is told, and where it may run.

    marconi replay --policy NAME[:NUMBER][@ADMISSION]       lru   marconi-static:0.5   best@judicious:64
    python -m sglang.launch_server --marconi-eviction NAME --marconi-admission ADMISSION

A policy is an eviction rule and the admission that it runs with unless another is asked for. An entry makes both from
what is `Given`; who serves by them, and from how much memory, is the caller's. The command lines, the docs and the
tests take their names from here. To add one: its rule in `policy/eviction`, an entry, a test (docs/add-a-policy.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from marconi.model.latency import LatencyModel
from marconi.policy.admission.base import Admission
from marconi.policy.admission.named import admission_of
from marconi.policy.admission.plan import Guarded, Judicious
from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.eviction.best import BestEviction
from marconi.policy.eviction.coverage import CoverageEviction
from marconi.policy.eviction.end_aware import EndAwareLru, NextPrompts
from marconi.policy.eviction.et_lru import ExpectedTailLru
from marconi.policy.eviction.gdsf import GreedyDualSizeFrequency
from marconi.policy.eviction.length_aware import LengthAwareLru
from marconi.policy.eviction.lru import JointLru, SeparateLru
from marconi.policy.eviction.seglen import SegmentLengthEviction
from marconi.policy.eviction.tail import TailEviction
from marconi.policy.eviction.threshold_lru import ThresholdLru
from marconi.policy.eviction.tlru import TailOptimizedLru
from marconi.policy.eviction.utility import ALPHA, ALPHAS, AgeingUtilityEviction, UtilityEviction
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.forecast.turns import Turns
from marconi.policy.hindsight.belady import BeladyEviction
from marconi.policy.hindsight.future import Future
from marconi.policy.hindsight.tail_belady import TailBeladyEviction
from marconi.policy.host_tier import NEEDS as HOST_NEEDS
from marconi.policy.host_tier import LoadTimes, WritePolicy
from marconi.policy.request import Trace
from marconi.policy.traffic import added_tokens, budget_tokens, turn_model

SGLANG_MAMBA_RATIO: Final = 0.9
"""SGLang 0.5.23's default of `--mamba-full-memory-ratio`: bytes for states over bytes for KV."""


class Runs(Enum):
    """Where a policy may run."""

    ANYWHERE = "server and replay"
    REPLAY = "replay"


class Told(Enum):
    """Knowledge that a policy is given beside the requests as they come."""

    NOTHING = "nothing"
    PREFILL_TIMES = "prefill times and a budget"
    TRAFFIC = "the traffic's means"
    FUTURE = "the requests to come"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The arguments that a policy is made from."""

    costs: Costs
    needs: frozenset[Need]
    """What memory may be short of: one pool's bytes, or KV and states."""
    unit_tokens: int = 1
    """Positions of states are multiples of it: the page, or the trace's unit."""
    number: float = math.nan
    """The policy's own; nan takes what it goes by without one."""
    latency: LatencyModel | None = None
    ttft_budget_s: float | None = None
    """Time to first token that is good enough, in seconds."""
    trace: Trace | None = None
    """What is going to be served, where that is known."""

    @property
    def budget_s(self) -> float:
        """The policy's own number as a time to first token, else what is good enough; `ValueError` without either."""
        if self.latency is None or (math.isnan(self.number) and self.ttft_budget_s is None):
            raise ValueError("prefill times and a budget for the time to first token are needed")
        return self.ttft_budget_s if math.isnan(self.number) and self.ttft_budget_s is not None else self.number

    @property
    def budget_tokens(self) -> int:
        """The policy's own number of uncached tokens, else what is computed within the budget."""
        if not math.isnan(self.number):
            return int(self.number)
        assert self.latency is not None
        return budget_tokens(self.latency, self.budget_s)

    @property
    def known_trace(self) -> Trace:
        """The trace, for a policy that is told of it."""
        assert self.trace is not None, "made for a server, though it runs in a replay alone"
        return self.trace


class Rules(NamedTuple):
    """The rules that a policy consists of."""

    eviction: Eviction
    admission: Admission


class Parameter(NamedTuple):
    """The number that a policy takes after the colon."""

    name: str
    default: float | None = None
    """None: it must be given."""
    is_whole: bool = False
    """Whether it counts something."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The parts of a policy's name, not yet looked up: `NAME[:NUMBER][@ADMISSION]`."""

    name: str
    parameter: str | None = None
    """What follows the colon; None takes the policy's default."""
    admission: str | None = None
    """What follows the `@`; None takes the policy's own."""

    @classmethod
    def parse(cls, text: str) -> "PolicySpec":
        """Read one policy; `ValueError` where a part is empty."""
        head, at, admission = text.strip().partition("@")
        name, colon, parameter = head.partition(":")
        if not name or (at and not admission) or (colon and not parameter):
            raise ValueError(f"policy {text!r} must be NAME, NAME:NUMBER or either with @ADMISSION")
        return cls(name, parameter if colon else None, admission if at else None)

    def __str__(self) -> str:
        parameter = "" if self.parameter is None else f":{self.parameter}"
        return f"{self.name}{parameter}" + ("" if self.admission is None else f"@{self.admission}")


def parse_list(text: str) -> tuple[PolicySpec, ...]:
    """Read policies separated by commas; `ValueError` for an empty list or the same one twice."""
    specs = tuple(PolicySpec.parse(part) for part in text.split(","))
    if len(set(specs)) != len(specs):
        raise ValueError(f"--policy {text!r} names a policy twice")
    return specs


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy."""

    name: str
    summary: str
    """One line, for `marconi replay --list-policies`."""
    make: Callable[[Given], Eviction] | None = None
    """The eviction rule; None for a cache of blocks and for the best of `alternatives`."""
    runs: Runs = Runs.REPLAY
    told: Told = Told.NOTHING
    admission: str = "judicious"
    """Which admission it runs with, unless another is asked for; a rule with a guard adds that to it."""
    parameter: Parameter | None = None
    mamba_ratio: float | None = None
    """Bytes for states over bytes for KV of its own layout in a replay; None is one pool."""
    write_policy: WritePolicy | None = None
    """When stock's host tier copies, for a policy that stands for stock; None takes the tier by worth."""
    ranks_copies: bool = False
    """Whether its rule can rank copies on the host: by what a node says of itself, or by a forecast that is shared."""
    caches_blocks: bool = False
    """Whether it caches a trace's blocks without a tree, so that its memory may be a number of them."""
    alternatives: tuple[PolicySpec, ...] = ()
    """The one with the most hit tokens is the policy."""
    requires: Callable[[Trace], object] | None = None
    """Raises `ValueError` for a trace that lacks what the policy is told of it."""

    def rules(self, given: Given, admission: str | None = None) -> Rules:
        """Its rules, with `admission` in place of its own; `ValueError` for what is not given or an unknown name."""
        assert self.make is not None, f"{self.name} has no rule of its own"
        eviction = self.make(given)
        if admission is None and eviction.guard is not None:
            return Rules(eviction, Guarded(Judicious(given.unit_tokens), eviction.guard, given.costs))
        return Rules(eviction, admission_of(admission or self.admission, given.unit_tokens))

    def host_eviction(self, given: Given, of_device: Eviction, times: LoadTimes) -> Eviction:
        """Its rule for copies on the host, beside the one for the device; `given` is what that was made from.

        `ValueError` if it has none.
        """
        assert self.make is not None, f"{self.name} has no rule of its own"
        self.require_host_rule()
        return of_device.for_copies(HOST_NEEDS, times.worth_of) or self.make(replace(given, needs=HOST_NEEDS))

    def require_host_rule(self) -> None:
        """`ValueError` for a rule that ranks by requests, of which it would have to hear for copies, too."""
        if not self.ranks_copies:
            able = ", ".join(entry.name for entry in ENTRIES.values() if entry.ranks_copies)
            raise ValueError(f"with a host tier the policy must be one of {able}, got {self.name}")

    def number(self, spec: PolicySpec) -> float:
        """The number that `spec` gives or the default; `ValueError` for one too many, one missing or a wrong one."""
        if self.parameter is None:
            if spec.parameter is not None:
                raise ValueError(f"policy {str(spec)!r}: {self.name} takes no number, got {spec.parameter!r}")
            return math.nan
        name = f"{self.name}:{self.parameter.name.upper()}"
        if spec.parameter is None:
            if self.parameter.default is None:
                raise ValueError(f"policy {str(spec)!r} must be {name}, with a number")
            return self.parameter.default
        try:
            number = float(spec.parameter)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf or (self.parameter.is_whole and not number.is_integer()):
            kind = "whole number" if self.parameter.is_whole else "number"
            raise ValueError(f"policy {str(spec)!r}: {name} must be a {kind}, 0 or more, got {spec.parameter!r}")
        return number

    def choices(self, spec: PolicySpec) -> tuple[PolicySpec, ...]:
        """The policies to replay for `spec`: itself, or each of the alternatives with its admission."""
        if not self.alternatives:
            return (spec,)
        return tuple(replace(choice, admission=spec.admission) for choice in self.alternatives)


_XI: Final = Parameter("xi", math.nan, is_whole=True)
"""T-LRU's budget in uncached tokens; by default what is computed within the objective of the time to first token."""


def _next(trace: Trace) -> NextPrompts:
    return NextPrompts(trace.requests)


def _tail(given: Given) -> Eviction:
    budget_s = given.budget_s
    assert given.latency is not None
    return TailEviction(given.latency.smallest_cached_tokens, budget_s, given.needs)


def _added(given: Given) -> int:
    return added_tokens(given.known_trace)


ENTRIES: Final = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Entry(
                "lru",
                "stock SGLang: two pools, two LRUs, states at chunk ends",
                lambda given: SeparateLru(given.needs),
                Runs.ANYWHERE,
                admission="chunk-end",
                mamba_ratio=SGLANG_MAMBA_RATIO,
                write_policy=WritePolicy.THROUGH,
                ranks_copies=True,
            ),
            Entry(
                "lru-write-back",
                "stock SGLang, whose host tier takes what is evicted: as lru without one",
                lambda given: SeparateLru(given.needs),
                admission="chunk-end",
                mamba_ratio=SGLANG_MAMBA_RATIO,
                write_policy=WritePolicy.BACK,
                ranks_copies=True,
            ),
            Entry(
                "lru-joint",
                "SGLang+ of the Marconi paper: one pool, leaves by last use, judicious admission",
                lambda given: JointLru(given.needs),
                Runs.ANYWHERE,
                ranks_copies=True,
            ),
            Entry(
                "vllm+",
                "vLLM+ of the Marconi paper: one pool, leaves by last use, a state at every block",
                lambda given: JointLru(given.needs),
                admission="every-block",
                ranks_copies=True,
            ),
            Entry(
                "marconi",
                "Marconi: recency + alpha * FLOP efficiency, ages in eviction ages",
                lambda given: AgeingUtilityEviction(given.costs, given.number, given.needs),
                Runs.ANYWHERE,
                parameter=Parameter("alpha", ALPHA),
                ranks_copies=True,
            ),
            Entry(
                "marconi-static",
                "the paper's own form with a fixed alpha: ages over the oldest one",
                lambda given: UtilityEviction(given.costs, given.number, given.needs),
                parameter=Parameter("alpha"),
                ranks_copies=True,
            ),
            Entry(
                "seglen",
                "SegLen: recency + tokens to replay from the nearest shallower state",
                lambda given: SegmentLengthEviction(given.needs),
                Runs.ANYWHERE,
                ranks_copies=True,
            ),
            Entry(
                "coverage",
                "thins the path of the least recently used state by the smallest gap it leaves",
                lambda given: CoverageEviction(given.needs),
                Runs.ANYWHERE,
            ),
            Entry(
                "gdsf",
                "greedy dual: ageing + uses * FLOPs saved / bytes freed",
                lambda given: GreedyDualSizeFrequency(given.costs, given.needs),
                Runs.ANYWHERE,
            ),
            Entry(
                "tlru",
                "T-LRU: of a conversation, all but its last XI tokens is needed; the rest goes first",
                lambda given: TailOptimizedLru(given.budget_tokens, _added(given), given.needs),
                told=Told.TRAFFIC,
                parameter=_XI,
            ),
            Entry(
                "threshold-lru",
                "conversations of no more than so many tokens go first",
                lambda given: ThresholdLru(int(given.number), given.needs),
                parameter=Parameter("tokens", 1024, is_whole=True),
            ),
            Entry(
                "et-lru",
                "least expected tail excess latency, under Poisson turns and fading belief",
                lambda given: ExpectedTailLru(
                    given.costs, turn_model(given.known_trace), given.budget_tokens, given.needs
                ),
                told=Told.TRAFFIC,
                parameter=_XI,
                requires=turn_model,
            ),
            Entry(
                "tail",
                "T-LRU for hybrid models: of a conversation, the shallowest state in time is kept",
                _tail,
                Runs.ANYWHERE,
                Told.PREFILL_TIMES,
                parameter=Parameter("seconds", math.nan),
            ),
            Entry(
                "best",
                "forecast: least expected saving per byte and second, learned while it serves; guarded admission",
                lambda given: BestEviction(given.costs, Forecast(Turns(given.unit_tokens)), given.needs),
                Runs.ANYWHERE,
                ranks_copies=True,
            ),
            Entry("lru-block", "blocks by last use, without a tree", caches_blocks=True),
            Entry("lfu", "blocks by number of uses", caches_blocks=True),
            Entry("s3fifo", "blocks in three static queues", caches_blocks=True),
            Entry(
                "belady",
                "bound: the state whose next use lies furthest in the future goes first",
                lambda given: BeladyEviction(given.costs, Future(given.known_trace), given.needs),
                told=Told.FUTURE,
            ),
            Entry(
                "tail-belady",
                "bound: what the next prompt is in time without goes first, then as belady",
                lambda given: TailBeladyEviction(
                    given.costs, Future(given.known_trace), given.budget_tokens, given.needs
                ),
                told=Told.FUTURE,
                parameter=_XI,
            ),
            Entry(
                "end-aware",
                "bound: T-LRU that knows whether a conversation goes on",
                lambda given: EndAwareLru(_next(given.known_trace), given.budget_tokens, _added(given), given.needs),
                told=Told.FUTURE,
                parameter=_XI,
                requires=_next,
            ),
            Entry(
                "length-aware",
                "bound: T-LRU that knows the next prompt's length",
                lambda given: LengthAwareLru(_next(given.known_trace), given.budget_tokens, given.needs),
                told=Told.FUTURE,
                parameter=_XI,
                requires=_next,
            ),
            Entry(
                "static-oracle",
                "bound: marconi-static with the alpha that proves best on the trace",
                told=Told.FUTURE,
                alternatives=tuple(PolicySpec("marconi-static", f"{alpha:g}") for alpha in ALPHAS),
            ),
        )
    }
)
"""By name, in the order in which they are listed."""

SERVED: Final = tuple(entry.name for entry in ENTRIES.values() if entry.runs is Runs.ANYWHERE)
"""What a server offers."""


def entry_of(spec: PolicySpec) -> Entry:
    """The entry that `spec` names, its number and admission checked; `ValueError`, with the known names, for others."""
    entry = ENTRIES.get(spec.name)
    if entry is None:
        raise ValueError(f"unknown policy {spec.name!r}: give one of {', '.join(ENTRIES)}")
    entry.number(spec)
    if spec.admission is not None:
        try:
            if entry.caches_blocks:
                raise ValueError("a block cache takes every block, an admission does not apply")
            admission_of(spec.admission, unit_tokens=1)
        except ValueError as error:
            raise ValueError(f"policy {str(spec)!r}: {error}") from None
    return entry
