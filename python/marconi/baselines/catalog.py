"""Every policy that a replay knows: those that a server offers, and the baselines, bounds and block caches beside them.

    marconi replay --policy NAME[:NUMBER][@ADMISSION]       lru   marconi-static:0.5   best@judicious:64

The command lines of `replay` and `plan`, the docs and the tests take their names from here. To add one: its rule in
`baselines/eviction`, an entry, a test (docs/add-a-policy.md). What an entry says is in `policy/catalog.py`.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from marconi.baselines.admission.named import admission_of
from marconi.baselines.eviction.coverage import CoverageEviction
from marconi.baselines.eviction.end_aware import EndAwareLru, NextPrompts
from marconi.baselines.eviction.et_lru import ExpectedTailLru
from marconi.baselines.eviction.gdsf import GreedyDualSizeFrequency
from marconi.baselines.eviction.joint_lru import JointLru
from marconi.baselines.eviction.length_aware import LengthAwareLru
from marconi.baselines.eviction.seglen import SegmentLengthEviction
from marconi.baselines.eviction.threshold_lru import ThresholdLru
from marconi.baselines.eviction.tlru import TailOptimizedLru
from marconi.baselines.hindsight.belady import BeladyEviction
from marconi.baselines.hindsight.future import Future
from marconi.baselines.hindsight.tail_belady import TailBeladyEviction
from marconi.baselines.traffic import added_tokens, budget_tokens, turn_model
from marconi.policy.catalog import SERVED, SGLANG_MAMBA_RATIO, Entry, Given, Parameter, PolicySpec, Rules, Told
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.host_tier import WritePolicy
from marconi.policy.request import Trace

ALPHAS: Final = (0.0, *(0.05 * 1.5**step for step in range(20)))
"""21 values of the paper's alpha: recency alone, and from near it to FLOP efficiency almost alone (few benefits are far
above the rest)."""

_XI: Final = Parameter("xi", math.nan, is_whole=True)
"""T-LRU's budget in uncached tokens; by default those computed within the objective of the time to first token."""


def _budget_tokens(given: Given) -> int:
    """The policy's own number of uncached tokens, else the number computed within the budget."""
    if not math.isnan(given.number):
        return int(given.number)
    assert given.latency is not None
    return budget_tokens(given.latency, given.budget_s)


def _trace(given: Given) -> Trace:
    assert given.trace is not None, "a policy that is told of the trace was made without one"
    return given.trace


def _next(trace: Trace) -> NextPrompts:
    return NextPrompts(trace.requests)


def _added(given: Given) -> int:
    return added_tokens(_trace(given))


ENTRIES: Final[Mapping[str, Entry]] = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            *SERVED.values(),
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
                ranks_copies=True,
            ),
            Entry(
                "coverage",
                "thins the path of the least recently used state by the smallest gap it leaves",
                lambda given: CoverageEviction(given.needs),
            ),
            Entry(
                "gdsf",
                "greedy dual: ageing + uses * FLOPs saved / bytes freed",
                lambda given: GreedyDualSizeFrequency(given.costs, given.needs),
            ),
            Entry(
                "tlru",
                "T-LRU: of a conversation, all but its last XI tokens is needed; the rest goes first",
                lambda given: TailOptimizedLru(_budget_tokens(given), _added(given), given.needs),
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
                    given.costs, turn_model(_trace(given)), _budget_tokens(given), given.needs
                ),
                told=Told.TRAFFIC,
                parameter=_XI,
                requires=turn_model,
            ),
            Entry("lru-block", "blocks by last use, without a tree", caches_blocks=True),
            Entry("lfu", "blocks by number of uses", caches_blocks=True),
            Entry("s3fifo", "blocks in three static queues", caches_blocks=True),
            Entry(
                "belady",
                "bound: the state whose next use lies furthest in the future goes first",
                lambda given: BeladyEviction(given.costs, Future(_trace(given)), given.needs),
                told=Told.FUTURE,
            ),
            Entry(
                "tail-belady",
                "bound: what the next prompt is in time without goes first, then as belady",
                lambda given: TailBeladyEviction(
                    given.costs, Future(_trace(given)), _budget_tokens(given), given.needs
                ),
                told=Told.FUTURE,
                parameter=_XI,
            ),
            Entry(
                "end-aware",
                "bound: T-LRU that knows whether a conversation goes on",
                lambda given: EndAwareLru(_next(_trace(given)), _budget_tokens(given), _added(given), given.needs),
                told=Told.FUTURE,
                parameter=_XI,
                requires=_next,
            ),
            Entry(
                "length-aware",
                "bound: T-LRU that knows the next prompt's length",
                lambda given: LengthAwareLru(_next(_trace(given)), _budget_tokens(given), given.needs),
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


def rules_of(entry: Entry, given: Given, admission: str | None = None) -> Rules:
    """The rules of `entry`, with the admission of that name in place of its own; `ValueError` for an unknown name."""
    name = entry.admission if admission is None else admission
    return entry.rules(given, None if name is None else admission_of(name, given.unit_tokens))
