"""A server's policies by the names of its flags: the objects that the replay runs.

What a state takes comes from the pools, what it saves from the model's configuration (`replay/online_tuner.costs_of`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from marconi.model.latency import LatencyModel
from marconi.policy.admission.base import Admission
from marconi.policy.admission.guarded import Guarded
from marconi.policy.admission.judicious import Judicious
from marconi.policy.admission.prefill import STEP_TOKENS
from marconi.policy.eviction.base import Costs, Eviction, Need
from marconi.policy.eviction.best import BestEviction
from marconi.policy.eviction.coverage import CoverageEviction
from marconi.policy.eviction.gdsf import GreedyDualSizeFrequency
from marconi.policy.eviction.lru import JointLru, SeparateLru
from marconi.policy.eviction.seglen import SegmentLengthEviction
from marconi.policy.eviction.tail import TailEviction
from marconi.policy.eviction.tiers import TieredEviction
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.served import ServedTree
from marconi.tree import RadixTree
from marconi.tree.memory import Memory
from marconi.tuning import Objective

TWO_POOLS: Final = frozenset({Need.KV, Need.STATE})
ONE_POOL: Final = frozenset({Need.BYTES})
"""`--enable-unified-memory`."""


class EvictionName(StrEnum):
    """What `--marconi-eviction` takes."""

    MARCONI = "marconi"
    BEST = "best"
    LRU = "lru"
    LRU_JOINT = "lru-joint"
    SEGLEN = "seglen"
    COVERAGE = "coverage"
    GDSF = "gdsf"
    TAIL = "tail"


class ObjectiveName(StrEnum):
    """What `--marconi-objective` takes."""

    HIT_RATE = "hit-rate"
    FLOPS = "flops"
    P95_TTFT = "p95-ttft"


OBJECTIVES: Final[Mapping[ObjectiveName, Objective]] = MappingProxyType(
    {
        ObjectiveName.HIT_RATE: Objective.TOKEN_HIT_RATE,
        ObjectiveName.FLOPS: Objective.FLOPS_SAVED,
        ObjectiveName.P95_TTFT: Objective.P95_TTFT,
    }
)


class AdmissionName(StrEnum):
    """What `--marconi-admission` takes."""

    JUDICIOUS = "judicious"
    CHUNK_END = "chunk-end"


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """What the operator chose."""

    eviction: EvictionName = EvictionName.BEST
    alpha: float | None = None
    """Weight of FLOP efficiency against recency, for `marconi`; None: it begins with 0 and is tuned."""
    objective: ObjectiveName = ObjectiveName.HIT_RATE
    """What it is tuned for."""
    ttft_budget_s: float | None = None
    """Time to first token that is good enough, for `tail` and the objective `p95-ttft`."""
    admission: AdmissionName = AdmissionName.JUDICIOUS
    max_ghosts: int = 1_000_000
    max_ghost_tokens: int | None = None
    step_tokens: int = STEP_TOKENS
    """Between two states that a long prefill leaves on its way."""

    @property
    def is_tuned(self) -> bool:
        """Whether alpha is."""
        return self.eviction is EvictionName.MARCONI and self.alpha is None


_Rule = Callable[[Costs, PolicyChoice, frozenset[Need]], Eviction]
_RULES: Final[Mapping[EvictionName, _Rule]] = MappingProxyType(
    {
        EvictionName.MARCONI: lambda costs, choice, needs: UtilityEviction(costs, choice.alpha or 0.0, needs),
        EvictionName.LRU: lambda costs, choice, needs: SeparateLru(needs),
        EvictionName.LRU_JOINT: lambda costs, choice, needs: JointLru(needs),
        EvictionName.SEGLEN: lambda costs, choice, needs: SegmentLengthEviction(needs),
        EvictionName.COVERAGE: lambda costs, choice, needs: CoverageEviction(needs),
        EvictionName.GDSF: lambda costs, choice, needs: GreedyDualSizeFrequency(costs, needs),
    }
)


def served_tree(
    choice: PolicyChoice,
    costs: Costs,
    page_tokens: int,
    ids_per_page: int,
    memory: Memory | None,
    latency: LatencyModel | None = None,
    needs: frozenset[Need] = TWO_POOLS,
) -> ServedTree:
    """A tree of pages of `page_tokens`, with the chosen policies; positions are the pages' ends.

    `needs` is what it is asked for when memory is short.

    Raises `ValueError` for `tail` without prefill times or a budget.
    """
    admission: Admission = Judicious(page_tokens)
    if choice.eviction is EvictionName.TAIL:
        if latency is None or choice.ttft_budget_s is None:
            raise ValueError("eviction tail: prefill times and a budget for the time to first token are needed")
        rule: Eviction = TailEviction(latency.smallest_cached_tokens, choice.ttft_budget_s, needs)
    elif choice.eviction is EvictionName.BEST:
        forecast = Forecast()
        rule = BestEviction(costs, forecast, needs)
        admission = Guarded(Judicious(page_tokens), forecast.divergence, costs)
    else:
        rule = _RULES[choice.eviction](costs, choice, needs)
    tree = RadixTree(page_tokens, choice.max_ghosts, ids_per_page, memory, choice.max_ghost_tokens)
    return ServedTree(tree, admission, TieredEviction(rule), choice.step_tokens)
