"""A tuner that chooses alpha while a replay goes on.

Trials run in line, between two requests, so equal traces give equal decisions at equal places; a server runs them in
processes beside it. Joint LRU is replayed beside the alphas, and none that it beats is taken (`tuning/choice.py`). The
tuner's clock is the replay's: a request counts as of the time it is told of.
"""

from functools import partial

from marconi.policy.catalog import Given
from marconi.policy.eviction.lru import JointLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.served import ServedTree
from marconi.replay.server import ServerCaches
from marconi.tuning import InlineWorkers, Objective, Score, Setup, TunableTree, Tuner


def tuner_of(
    served: ServedTree, rule: UtilityEviction, caches: ServerCaches, given: Given, objective: Objective
) -> Tuner:
    """A tuner of `served`, whose eviction is `rule`; its trials are `caches`."""

    def apply(alpha: float) -> None:
        rule.weight = alpha

    prefill_s = None if given.latency is None else given.latency.seconds
    setup = Setup(
        partial(UtilityEviction, given.costs, needs=given.needs),
        caches,
        Score(objective, given.costs.flops, prefill_s),
        partial(JointLru, given.needs),
    )
    return Tuner(TunableTree(served, apply), setup, InlineWorkers())
