"""Objectives of tuning. Every score is a share between 0 (nothing cached) and 1, so one margin fits all.

    token hit rate      tokens that were not computed / prompt tokens
    FLOPs saved         FLOPs(tokens that were not computed) / FLOPs(prompts), summed over requests
    P95 TTFT            1 - P95 of the prefill times / P95 of the prefill times with nothing cached, by nearest rank;
                        either no less than the budget, if there is one: below it a tail is as good as any

The prefill times are those of an idle server: queueing needs a clock of its own and is no part of a quick trial.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from marconi.policy.eviction.base import PrefixFlops
from marconi.tuning.percentile import nearest_rank


class Objective(StrEnum):
    """The objective that the operator chose."""

    TOKEN_HIT_RATE = "hit-rate"  # noqa: S105 - a token of text
    FLOPS_SAVED = "flops"
    P95_TTFT = "p95-ttft"


class PrefillSeconds(Protocol):
    """Seconds to the first token of a prompt of which a prefix is cached."""

    def __call__(self, num_cached_tokens: int, num_prompt_tokens: int, /) -> float:
        """Seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Score:
    """Scores what a replay served. `ValueError` where the objective lacks its cost function."""

    objective: Objective = Objective.TOKEN_HIT_RATE
    flops: PrefixFlops | None = None
    prefill_s: PrefillSeconds | None = None
    budget_s: float = 0.0
    """Time to first token that is good enough."""

    def __post_init__(self) -> None:
        if self.objective is Objective.FLOPS_SAVED and self.flops is None:
            raise ValueError(f"objective {self.objective}: give the FLOPs of a prefix")
        if self.objective is Objective.P95_TTFT and self.prefill_s is None:
            raise ValueError(f"objective {self.objective}: give the prefill times")

    def __call__(self, num_cached_tokens: Sequence[int], num_prompt_tokens: Sequence[int]) -> float:
        """The score of requests with these prompts; 0 for none."""
        if not num_prompt_tokens:
            return 0.0
        if self.flops is not None and self.objective is Objective.FLOPS_SAVED:
            return sum(map(self.flops, num_cached_tokens)) / sum(map(self.flops, num_prompt_tokens))
        if self.prefill_s is not None and self.objective is Objective.P95_TTFT:
            seconds = sorted(map(self.prefill_s, num_cached_tokens, num_prompt_tokens))
            uncached = sorted(self.prefill_s(0, num_prompt) for num_prompt in num_prompt_tokens)
            with_nothing_s = max(nearest_rank(uncached, 95), self.budget_s)
            return 1.0 - max(nearest_rank(seconds, 95), self.budget_s) / with_nothing_s if with_nothing_s else 0.0
        return sum(num_cached_tokens) / sum(num_prompt_tokens)
