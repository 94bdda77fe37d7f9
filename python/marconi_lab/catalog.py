"""The policies that a replay compares with and no server offers: baselines, bounds and block caches.

To add one: its rule in `marconi_lab/eviction`, a `ReplayPolicy` here, a test (docs/add-a-policy.md). The fields are
described in `policy/catalog.py` and `replay/catalog.py`, which finds this list.
"""

import math
from functools import partial
from typing import Final

from marconi.policy.catalog import SGLANG_MAMBA_RATIO, Knowledge, Parameter, PolicyInputs, PolicySpec
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.host_tier import WritePolicy
from marconi.policy.request import Trace
from marconi.replay.catalog import ReplayPolicy
from marconi_lab.block.server import BlockServer
from marconi_lab.eviction.coverage import CoverageEviction
from marconi_lab.eviction.end_aware import EndAwareLru, NextPrompts
from marconi_lab.eviction.et_lru import ExpectedTailLru
from marconi_lab.eviction.gdsf import GreedyDualSizeFrequency
from marconi_lab.eviction.joint_lru import JointLru
from marconi_lab.eviction.length_aware import LengthAwareLru
from marconi_lab.eviction.seglen import SegmentLengthEviction
from marconi_lab.eviction.threshold_lru import ThresholdLru
from marconi_lab.eviction.tlru import TailOptimizedLru
from marconi_lab.eviction.tuned import LEAST_MULTIPLE, TunedUtilityEviction
from marconi_lab.hindsight.belady import BeladyEviction
from marconi_lab.hindsight.future import Future
from marconi_lab.hindsight.tail_belady import TailBeladyEviction
from marconi_lab.traffic import added_tokens, budget_tokens, turn_model
from marconi_lab.tuned import TunedServer

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


POLICIES: Final = (
    ReplayPolicy(
        "lru-write-back",
        "stock SGLang, whose host tier takes what is evicted: as lru without one",
        lambda inputs: SeparateLru(inputs.needs),
        admission="chunk-end",
        mamba_ratio=SGLANG_MAMBA_RATIO,
        write_policy=WritePolicy.BACK,
        ranks_copies=True,
    ),
    ReplayPolicy(
        "lru-joint",
        "SGLang+ of the Marconi paper: one pool, leaves by last use, judicious admission",
        lambda inputs: JointLru(inputs.needs),
        ranks_copies=True,
    ),
    ReplayPolicy(
        "vllm+",
        "vLLM+ of the Marconi paper: one pool, leaves by last use, a state at every block",
        lambda inputs: JointLru(inputs.needs),
        admission="every-block",
        ranks_copies=True,
    ),
    ReplayPolicy(
        "marconi-static",
        "the paper's own form with a fixed alpha: ages over the oldest one",
        lambda inputs: UtilityEviction(inputs.costs, inputs.number, inputs.needs),
        parameter=Parameter("alpha"),
        ranks_copies=True,
    ),
    ReplayPolicy(
        "marconi-tuned",
        "marconi-static as the paper tunes it: alpha 0, then the one that hits most in a bootstrap window",
        lambda inputs: TunedUtilityEviction(inputs.costs, ALPHAS, int(inputs.number), inputs.needs),
        parameter=Parameter("multiple", LEAST_MULTIPLE, is_whole=True),
        server=TunedServer,
    ),
    ReplayPolicy(
        "seglen",
        "SegLen: recency + tokens to replay from the nearest shallower state",
        lambda inputs: SegmentLengthEviction(inputs.needs),
        ranks_copies=True,
    ),
    ReplayPolicy(
        "coverage",
        "thins the path of the least recently used state by the smallest gap it leaves",
        lambda inputs: CoverageEviction(inputs.needs),
    ),
    ReplayPolicy(
        "gdsf",
        "greedy dual: ageing + uses * FLOPs saved / bytes freed",
        lambda inputs: GreedyDualSizeFrequency(inputs.costs, inputs.needs),
    ),
    ReplayPolicy(
        "tlru",
        "T-LRU: of a conversation, all but its last XI tokens is needed; the rest is evicted first",
        lambda inputs: TailOptimizedLru(_budget_tokens(inputs), _added(inputs), inputs.needs),
        knowledge=Knowledge.TRAFFIC,
        parameter=_XI,
    ),
    ReplayPolicy(
        "threshold-lru",
        "conversations of at most TOKENS tokens are evicted first",
        lambda inputs: ThresholdLru(int(inputs.number), inputs.needs),
        parameter=Parameter("tokens", 1024, is_whole=True),
    ),
    ReplayPolicy(
        "et-lru",
        "least expected tail excess latency, under Poisson turns and fading belief",
        lambda inputs: ExpectedTailLru(inputs.costs, turn_model(_trace(inputs)), _budget_tokens(inputs), inputs.needs),
        knowledge=Knowledge.TRAFFIC,
        parameter=_XI,
        requires=turn_model,
    ),
    ReplayPolicy("lru-block", "blocks by last use, without a tree", blocks=partial(BlockServer, "lru-block")),
    ReplayPolicy("lfu", "blocks by number of uses", blocks=partial(BlockServer, "lfu")),
    ReplayPolicy("s3fifo", "blocks in three static queues", blocks=partial(BlockServer, "s3fifo")),
    ReplayPolicy(
        "belady",
        "bound: evicts the state whose next use lies furthest in the future",
        lambda inputs: BeladyEviction(inputs.costs, Future(_trace(inputs)), inputs.needs),
        knowledge=Knowledge.FUTURE,
    ),
    ReplayPolicy(
        "tail-belady",
        "bound: evicts what the next prompt is in time without, then as belady",
        lambda inputs: TailBeladyEviction(inputs.costs, Future(_trace(inputs)), _budget_tokens(inputs), inputs.needs),
        knowledge=Knowledge.FUTURE,
        parameter=_XI,
    ),
    ReplayPolicy(
        "end-aware",
        "bound: T-LRU that knows whether a conversation continues",
        lambda inputs: EndAwareLru(_next(_trace(inputs)), _budget_tokens(inputs), _added(inputs), inputs.needs),
        knowledge=Knowledge.FUTURE,
        parameter=_XI,
        requires=_next,
    ),
    ReplayPolicy(
        "length-aware",
        "bound: T-LRU that knows the next prompt's length",
        lambda inputs: LengthAwareLru(_next(_trace(inputs)), _budget_tokens(inputs), inputs.needs),
        knowledge=Knowledge.FUTURE,
        parameter=_XI,
        requires=_next,
    ),
    ReplayPolicy(
        "static-oracle",
        "bound: marconi-static with the alpha that proves best on the trace",
        knowledge=Knowledge.FUTURE,
        alternatives=tuple(PolicySpec("marconi-static", f"{alpha:g}") for alpha in ALPHAS),
    ),
)
"""In the order in which they are listed."""
