"""A tuner that chooses alpha while a replay goes on.

Trials run in line, between two requests, so equal traces give equal decisions at equal places; a server runs them in
processes beside it. Joint LRU is replayed beside the alphas, and none that it beats is taken (`tuning/choice.py`). The
tuner's clock is the replay's: a request counts as of the time it is told of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from marconi.policy.admission.base import Admission
from marconi.policy.catalog import Given
from marconi.policy.eviction.base import Eviction
from marconi.policy.eviction.lru import JointLru
from marconi.policy.eviction.tiers import TieredEviction
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.forecast.turns import Turns
from marconi.policy.served import ServedTree
from marconi.replay.pools import Pool
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.tree import RadixTree
from marconi.tuning import InlineWorkers, Objective, Score, Setup, TunableTree, Tuner


@dataclass(frozen=True, slots=True)
class ServerCaches:
    """Makes servers of one size: what a tuner replays in place of the real one (`tuning/trial.py`)."""

    admission: Admission
    memory: Callable[[], Pool]
    """A server's memory, all of it free."""
    scheduling: Scheduling = Scheduling()  # noqa: RUF009 - frozen

    def __call__(self, tree: RadixTree, eviction: Eviction) -> ServerReplay:
        """A server whose cache holds `tree` and evicts by `eviction`, which knows no node yet.

        Raises `ValueError` for a tree that holds more than there is.
        """
        memory = self.memory()
        if not memory.holds(tree.num_tokens, tree.num_states):
            held = f"{tree.num_tokens} tokens and {tree.num_states} states"
            raise ValueError(f"a tree must fit into {memory}, got one of {held}")
        memory.take(tree.num_tokens, tree.num_states)
        # What a server keeps because it has seen little is no part of a trial: it has seen what the tree holds.
        turns = Turns(tree.unit_tokens, cold_requests=0)
        served = ServedTree(tree, self.admission, TieredEviction(eviction), turns=turns)
        return ServerReplay(served, memory, self.scheduling)


def tuner_of(
    served: ServedTree, rules: Sequence[UtilityEviction], caches: ServerCaches, given: Given, objective: Objective
) -> Tuner:
    """A tuner of `served`, which evicts by `rules`, one a tier; its trials are `caches`, which have the device's."""

    def apply(alpha: float) -> None:
        for rule in rules:
            rule.weight = alpha

    prefill_s = None if given.latency is None else given.latency.seconds
    setup = Setup(
        partial(UtilityEviction, given.costs, needs=given.needs),
        caches,
        Score(objective, given.costs.flops, prefill_s),
        partial(JointLru, given.needs),
    )
    return Tuner(TunableTree(served, apply), setup, InlineWorkers())
