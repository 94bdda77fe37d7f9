"""Every policy that a replay knows, a line each.

To add one: its rule in `marconi/policy/eviction`, an entry here, a test. The second column of an entry is what
`--list-policies` prints; a tree policy says its eviction rule, its admission and, where its memory is two pools, their
ratio.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Final, TypeAlias

from marconi.policy.admission.base import Admission
from marconi.policy.admission.guarded import Guarded
from marconi.policy.admission.judicious import Judicious
from marconi.policy.eviction.base import Eviction, Need
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
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.hindsight.belady import BeladyEviction
from marconi.policy.hindsight.future import Future
from marconi.policy.hindsight.tail_belady import TailBeladyEviction
from marconi.policy.request import Trace
from marconi.replay.policies.admissions import admission_of
from marconi.replay.policies.block import BlockServer
from marconi.replay.policies.cache import ReplayCache
from marconi.replay.policies.entry import Entry, Parameter, Recipe, Setting, Subject, needs_of
from marconi.replay.policies.spec import PolicySpec
from marconi.replay.policies.traffic import added_tokens, budget_tokens, turn_model
from marconi.replay.policies.tuned import tuned
from marconi.tree import RadixTree
from marconi.tuning import MARCONI_GRID

SGLANG_MAMBA_RATIO: Final = 0.9
"""SGLang 0.5.23's default of `--mamba-full-memory-ratio`: bytes for states over bytes for KV."""

Rule: TypeAlias = Callable[[Setting, float, frozenset[Need]], Eviction]
"""An eviction rule from the setting, the policy's number and what its pools may be short of."""


_XI: Final = Parameter("xi", math.nan, is_whole=True)
"""T-LRU's budget in uncached tokens; by default what is computed within the objective of the time to first token."""


def _xi(setting: Setting, number: float) -> int:
    return budget_tokens(setting.latency, setting.slo_s) if math.isnan(number) else int(number)


def _next(trace: Trace) -> NextPrompts:
    return NextPrompts(trace.requests)


def _tree(rule: Rule, admission: str = "judicious") -> Recipe:
    """A policy over the radix tree."""

    def make(setting: Setting, spec: PolicySpec, number: float) -> Subject:
        budget = setting.budget()
        unit_tokens = setting.trace.unit_tokens
        tree = RadixTree(unit_tokens, setting.max_ghosts)
        chooses = admission_of(spec.admission or admission, unit_tokens)
        return Subject(ReplayCache(tree, chooses, rule(setting, number, needs_of(budget)), setting.costs, budget))

    return make


def _marconi(setting: Setting, spec: PolicySpec, number: float) -> Subject:
    """Marconi with its tuner."""
    budget = setting.budget()
    unit_tokens = setting.trace.unit_tokens
    rule = UtilityEviction(setting.costs, needs=needs_of(budget))
    admission = admission_of(spec.admission or "judicious", unit_tokens)
    cache = ReplayCache(RadixTree(unit_tokens, setting.max_ghosts), admission, rule, setting.costs, budget)
    return tuned(setting, cache, rule, lambda alpha: UtilityEviction(setting.costs, alpha, needs_of(budget)))


def _best(setting: Setting, spec: PolicySpec, number: float) -> Subject:
    """The forecast rule, and the admission that shares its forecast unless another is asked for."""
    budget = setting.budget()
    unit_tokens = setting.trace.unit_tokens
    forecast = Forecast()
    rule = BestEviction(setting.costs, forecast, needs_of(budget))
    admission: Admission = Guarded(Judicious(unit_tokens), forecast.divergence, setting.costs)
    if spec.admission is not None:
        admission = admission_of(spec.admission, unit_tokens)
    return Subject(ReplayCache(RadixTree(unit_tokens, setting.max_ghosts), admission, rule, setting.costs, budget))


def _blocks(setting: Setting, spec: PolicySpec, number: float) -> Subject:
    """A cache of the trace's blocks."""
    return Subject(BlockServer(spec.name, setting.memory_bytes, setting.trace.unit_tokens, setting.costs))


ENTRIES: Final = MappingProxyType(
    {
        entry.name: entry
        for entry in (
            Entry(
                "lru",
                "stock SGLang: two pools, two LRUs, states at chunk ends",
                _tree(lambda s, n, needs: SeparateLru(needs), "chunk-end"),
                mamba_ratio=SGLANG_MAMBA_RATIO,
            ),
            Entry(
                "lru-joint",
                "SGLang+ of the Marconi paper: one pool, leaves by last use, judicious admission",
                _tree(lambda s, n, needs: JointLru(needs)),
            ),
            Entry(
                "vllm+",
                "vLLM+ of the Marconi paper: one pool, leaves by last use, a state at every block",
                _tree(lambda s, n, needs: JointLru(needs), "every-block"),
            ),
            Entry(
                "marconi",
                "Marconi: recency + alpha * FLOP efficiency, alpha tuned while it serves",
                _marconi,
            ),
            Entry(
                "marconi-static",
                "Marconi with a fixed alpha: recency + alpha * FLOP efficiency",
                _tree(lambda s, n, needs: UtilityEviction(s.costs, n, needs)),
                Parameter("alpha"),
            ),
            Entry(
                "seglen",
                "SegLen: recency + tokens to replay from the nearest shallower state",
                _tree(lambda s, n, needs: SegmentLengthEviction(needs)),
            ),
            Entry(
                "coverage",
                "thins the path of the least recently used state by the smallest gap it leaves",
                _tree(lambda s, n, needs: CoverageEviction(needs)),
            ),
            Entry(
                "gdsf",
                "greedy dual: ageing + uses * FLOPs saved / bytes freed",
                _tree(lambda s, n, needs: GreedyDualSizeFrequency(s.costs, needs)),
            ),
            Entry(
                "tlru",
                "T-LRU: of a conversation, all but its last XI tokens is needed; the rest goes first",
                _tree(lambda s, n, needs: TailOptimizedLru(_xi(s, n), added_tokens(s.trace), needs)),
                _XI,
            ),
            Entry(
                "threshold-lru",
                "conversations of no more than so many tokens go first",
                _tree(lambda s, n, needs: ThresholdLru(int(n), needs)),
                Parameter("tokens", 1024, is_whole=True),
            ),
            Entry(
                "et-lru",
                "least expected tail excess latency, under Poisson turns and fading belief",
                _tree(lambda s, n, needs: ExpectedTailLru(s.costs, turn_model(s.trace), _xi(s, n), needs)),
                _XI,
                requires=turn_model,
            ),
            Entry(
                "tail",
                "T-LRU for hybrid models: of a conversation, the shallowest state in time is kept",
                _tree(
                    lambda s, n, needs: TailEviction(
                        s.latency.smallest_cached_tokens, s.slo_s if math.isnan(n) else n, needs
                    )
                ),
                Parameter("seconds", math.nan),
            ),
            Entry(
                "best",
                "forecast: least expected saving per byte and second, learned while it serves; guarded admission",
                _best,
            ),
            Entry("lru-block", "blocks by last use, without a tree", _blocks, caches_blocks=True),
            Entry("lfu", "blocks by number of uses", _blocks, caches_blocks=True),
            Entry("s3fifo", "blocks in three static queues", _blocks, caches_blocks=True),
            Entry(
                "belady",
                "bound: the state whose next use lies furthest in the future goes first",
                _tree(lambda s, n, needs: BeladyEviction(s.costs, Future(s.trace), needs)),
            ),
            Entry(
                "tail-belady",
                "bound: what the next prompt is in time without goes first, then as belady",
                _tree(lambda s, n, needs: TailBeladyEviction(s.costs, Future(s.trace), _xi(s, n), needs)),
                _XI,
            ),
            Entry(
                "end-aware",
                "bound: T-LRU that knows whether a conversation goes on",
                _tree(lambda s, n, needs: EndAwareLru(_next(s.trace), _xi(s, n), added_tokens(s.trace), needs)),
                _XI,
                requires=_next,
            ),
            Entry(
                "length-aware",
                "bound: T-LRU that knows the next prompt's length",
                _tree(lambda s, n, needs: LengthAwareLru(_next(s.trace), _xi(s, n), needs)),
                _XI,
                requires=_next,
            ),
            Entry(
                "static-oracle",
                "bound: Marconi with the alpha that proves best on the trace",
                alternatives=tuple(PolicySpec("marconi-static", f"{alpha:g}") for alpha in MARCONI_GRID),
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
    with _named(spec):
        if spec.admission is not None:
            if entry.caches_blocks:
                raise ValueError("a block cache takes every block, an admission does not apply")
            admission_of(spec.admission, unit_tokens=1)
    return entry


def require_possible(spec: PolicySpec, setting: Setting) -> None:
    """`ValueError`, in which `spec` is named, if it cannot be built for `setting`; quick, for nothing large is made."""
    entry = entry_of(spec)
    with _named(spec):
        laid_out = entry.lay_out(setting)
        if entry.caches_blocks:
            _blocks(laid_out, spec, math.nan)
            return
        laid_out.budget()
        if spec.admission is not None:
            admission_of(spec.admission, setting.trace.unit_tokens)
        if entry.requires is not None:
            entry.requires(setting.trace)


def build(spec: PolicySpec, setting: Setting) -> Subject:
    """A new subject for `spec`, which is not one with alternatives; `ValueError` if it cannot be."""
    entry = entry_of(spec)
    assert entry.make is not None, f"{spec} is the best of several: replay its choices"
    with _named(spec):
        laid_out = entry.lay_out(setting)
        subject = entry.make(laid_out, spec, entry.number(spec))
    return replace(subject, mamba_ratio=laid_out.mamba_ratio if setting.has_states else None)


@contextmanager
def _named(spec: PolicySpec) -> Iterator[None]:
    """Put the policy's name before the message of a `ValueError`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"policy {str(spec)!r}: {error}") from None
