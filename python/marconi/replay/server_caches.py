"""Trials of a server: what the tuner replays when the real cache is one (`tuning/trial.py`).

Memory as a server lends it, taken while a request runs, on a tree that holds something already.
"""

from collections.abc import Callable
from dataclasses import dataclass

from marconi.policy.admission.base import Admission
from marconi.policy.eviction.base import Eviction
from marconi.policy.eviction.tiers import TieredEviction
from marconi.policy.forecast.turns import Turns
from marconi.policy.served import ServedTree
from marconi.replay.pools import Memory
from marconi.replay.server import Scheduling, ServerReplay
from marconi.tree import RadixTree


@dataclass(frozen=True, slots=True)
class ServerCaches:
    """Makes servers of one size."""

    admission: Admission
    memory: Callable[[], Memory]
    """A server's memory, all of it free."""
    scheduling: Scheduling = Scheduling()  # noqa: RUF009 - frozen

    def __call__(self, tree: RadixTree, eviction: Eviction) -> ServerReplay:
        """A server whose cache holds `tree` and evicts by `eviction`, which knows no node yet.

        Raises `ValueError` for fewer slots than a request takes, or a tree that holds more than there is.
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
