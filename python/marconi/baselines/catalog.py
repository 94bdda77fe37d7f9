"""Every policy that a replay knows: those that a server offers, and the baselines, bounds and block caches beside them.

    marconi replay --policy NAME[:NUMBER][@ADMISSION]       lru   marconi-static:0.5   best@judicious:64

The command lines of `replay` and `plan`, the docs and the tests take their names from here. To add one: its rule in
`baselines/eviction`, a `Policy`, a test (docs/add-a-policy.md). The fields of a `Policy` are described in
`policy/catalog.py`.
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
from marconi.baselines.eviction.tuned import LEAST_MULTIPLE, TunedUtilityEviction
from marconi.baselines.hindsight.belady import BeladyEviction
from marconi.baselines.hindsight.future import Future
from marconi.baselines.hindsight.tail_belady import TailBeladyEviction
from marconi.baselines.traffic import added_tokens, budget_tokens, turn_model
from marconi.policy.catalog import (
    SERVED,
    SGLANG_MAMBA_RATIO,
    Knowledge,
    Parameter,
    Policy,
    PolicyInputs,
    PolicySpec,
    Rules,
)
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.host_tier import WritePolicy
from marconi.policy.request import Trace

ALPHAS: Final = (0.0, *(0.05 * 1.5**step for step in range(20)))
"""21 values of the paper's alpha: recency alone, and from near it to FLOP efficiency almost alone (few benefits are far
above the rest)."""

_XI: Final = Parameter("xi", math.nan, is_whole=True)
"""T-LRU's budget in uncached tokens; by default those computed within the objective of the time to first token."""


def _budget_tokens(inputs: PolicyInputs) -> int:
    """The policy's own number of uncached tokens, else the number computed within the budget."""
    if not math.isnan(inputs.number):
        return int(inputs.number)
    assert inputs.latency is not None
    return budget_tokens(inputs.latency, inputs.budget_s)


def _trace(inputs: PolicyInputs) -> Trace:
    assert inputs.trace is not None, "a policy that knows the trace was made without one"
    return inputs.trace


def _next(trace: Trace) -> NextPrompts:
    return NextPrompts(trace.requests)


def _added(inputs: PolicyInputs) -> int:
    return added_tokens(_trace(inputs))


POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            *SERVED.values(),
            Policy(
                "lru-write-back",
                "stock SGLang, whose host tier takes what is evicted: as lru without one",
                lambda inputs: SeparateLru(inputs.needs),
                admission="chunk-end",
                mamba_ratio=SGLANG_MAMBA_RATIO,
                write_policy=WritePolicy.BACK,
                ranks_copies=True,
            ),
            Policy(
                "lru-joint",
                "SGLang+ of the Marconi paper: one pool, leaves by last use, judicious admission",
                lambda inputs: JointLru(inputs.needs),
                ranks_copies=True,
            ),
            Policy(
                "vllm+",
                "vLLM+ of the Marconi paper: one pool, leaves by last use, a state at every block",
                lambda inputs: JointLru(inputs.needs),
                admission="every-block",
                ranks_copies=True,
            ),
            Policy(
                "marconi-static",
                "the paper's own form with a fixed alpha: ages over the oldest one",
                lambda inputs: UtilityEviction(inputs.costs, inputs.number, inputs.needs),
                parameter=Parameter("alpha"),
                ranks_copies=True,
            ),
            Policy(
                "marconi-tuned",
                "marconi-static as the paper tunes it: alpha 0, then the one that hits most in a bootstrap window",
                lambda inputs: TunedUtilityEviction(inputs.costs, ALPHAS, int(inputs.number), inputs.needs),
                parameter=Parameter("multiple", LEAST_MULTIPLE, is_whole=True),
            ),
            Policy(
                "seglen",
                "SegLen: recency + tokens to replay from the nearest shallower state",
                lambda inputs: SegmentLengthEviction(inputs.needs),
                ranks_copies=True,
            ),
            Policy(
                "coverage",
                "thins the path of the least recently used state by the smallest gap it leaves",
                lambda inputs: CoverageEviction(inputs.needs),
            ),
            Policy(
                "gdsf",
                "greedy dual: ageing + uses * FLOPs saved / bytes freed",
                lambda inputs: GreedyDualSizeFrequency(inputs.costs, inputs.needs),
            ),
            Policy(
                "tlru",
                "T-LRU: of a conversation, all but its last XI tokens is needed; the rest is evicted first",
                lambda inputs: TailOptimizedLru(_budget_tokens(inputs), _added(inputs), inputs.needs),
                knowledge=Knowledge.TRAFFIC,
                parameter=_XI,
            ),
            Policy(
                "threshold-lru",
                "conversations of no more than so many tokens are evicted first",
                lambda inputs: ThresholdLru(int(inputs.number), inputs.needs),
                parameter=Parameter("tokens", 1024, is_whole=True),
            ),
            Policy(
                "et-lru",
                "least expected tail excess latency, under Poisson turns and fading belief",
                lambda inputs: ExpectedTailLru(
                    inputs.costs, turn_model(_trace(inputs)), _budget_tokens(inputs), inputs.needs
                ),
                knowledge=Knowledge.TRAFFIC,
                parameter=_XI,
                requires=turn_model,
            ),
            Policy("lru-block", "blocks by last use, without a tree", caches_blocks=True),
            Policy("lfu", "blocks by number of uses", caches_blocks=True),
            Policy("s3fifo", "blocks in three static queues", caches_blocks=True),
            Policy(
                "belady",
                "bound: evicts the state whose next use lies furthest in the future",
                lambda inputs: BeladyEviction(inputs.costs, Future(_trace(inputs)), inputs.needs),
                knowledge=Knowledge.FUTURE,
            ),
            Policy(
                "tail-belady",
                "bound: evicts what the next prompt is in time without, then as belady",
                lambda inputs: TailBeladyEviction(
                    inputs.costs, Future(_trace(inputs)), _budget_tokens(inputs), inputs.needs
                ),
                knowledge=Knowledge.FUTURE,
                parameter=_XI,
            ),
            Policy(
                "end-aware",
                "bound: T-LRU that knows whether a conversation continues",
                lambda inputs: EndAwareLru(_next(_trace(inputs)), _budget_tokens(inputs), _added(inputs), inputs.needs),
                knowledge=Knowledge.FUTURE,
                parameter=_XI,
                requires=_next,
            ),
            Policy(
                "length-aware",
                "bound: T-LRU that knows the next prompt's length",
                lambda inputs: LengthAwareLru(_next(_trace(inputs)), _budget_tokens(inputs), inputs.needs),
                knowledge=Knowledge.FUTURE,
                parameter=_XI,
                requires=_next,
            ),
            Policy(
                "static-oracle",
                "bound: marconi-static with the alpha that proves best on the trace",
                knowledge=Knowledge.FUTURE,
                alternatives=tuple(PolicySpec("marconi-static", f"{alpha:g}") for alpha in ALPHAS),
            ),
        )
    }
)
"""By name, in the order in which they are listed."""


def resolve_policy(spec: PolicySpec) -> Policy:
    """The policy of that name, its number and admission checked; `ValueError`, with the known names, for others."""
    policy = POLICIES.get(spec.name)
    if policy is None:
        raise ValueError(f"unknown policy {spec.name!r}: give one of {', '.join(POLICIES)}")
    policy.number(spec)
    if spec.admission is not None:
        try:
            if policy.caches_blocks:
                raise ValueError("a block cache takes every block, an admission does not apply")
            admission_of(spec.admission, unit_tokens=1)
        except ValueError as error:
            raise ValueError(f"policy {str(spec)!r}: {error}") from None
    return policy


def rules_of(policy: Policy, inputs: PolicyInputs, admission: str | None = None) -> Rules:
    """The rules of `policy`, with the admission of that name in place of its own; `ValueError` for an unknown name."""
    name = policy.admission if admission is None else admission
    return policy.rules(inputs, None if name is None else admission_of(name, inputs.unit_tokens))
