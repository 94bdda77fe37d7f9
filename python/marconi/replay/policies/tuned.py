"""A rule whose weight the tuner chooses while a replay goes on.

Trials run in line, between two requests, so equal traces give equal decisions at equal places; a server runs them in
processes beside it. Joint LRU is replayed beside the weights, and none that it beats is taken (`tuning/choice.py`). The
tuner's clock is the cache's: a request counts as of the time it is told of.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from marconi.policy.eviction.base import Eviction
from marconi.policy.eviction.classed import ClassedEviction
from marconi.policy.eviction.lru import JointLru
from marconi.policy.request import Request
from marconi.replay.policies.cache import ReplayCache
from marconi.replay.policies.entry import Setting, Subject, needs_of
from marconi.tuning import InlineWorkers, PrefixCaches, Score, Setup, TunableTree, Tuner


def tuned(setting: Setting, cache: ReplayCache, rule: ClassedEviction, make: Callable[[float], Eviction]) -> Subject:
    """`cache`, whose eviction is `rule`, with a tuner that tries the rules that `make` gives for a weight."""

    def apply(weight: float) -> None:
        rule.weight = weight

    score = Score(setting.objective, setting.costs.flops, setting.latency.seconds)
    lru = partial(JointLru, needs_of(cache.budget))
    setup = Setup(make, PrefixCaches(cache.admission, setting.costs, cache.budget), score, lru)
    tuner = Tuner(TunableTree(cache, apply), setup, InlineWorkers())

    def served(request: Request, now_s: float) -> None:
        tuner.observe(request if request.arrival_s == now_s else replace(request, arrival_s=now_s))
        tuner.poll()

    return Subject(cache, served, lambda: f"alpha {tuner.value:.4g}")
