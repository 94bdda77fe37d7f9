"""Trials of a server: what the tuner replays when the real cache is one (`tuning/trial.py`).

Two pools, taken while a request runs, on a tree that holds something already.
"""

from dataclasses import dataclass

from marconi.policy.admission.base import Admission
from marconi.policy.eviction.base import Eviction
from marconi.policy.eviction.tiers import TieredEviction
from marconi.policy.served import ServedTree
from marconi.replay.server import Pools, Scheduling, ServerReplay
from marconi.tree import RadixTree


@dataclass(frozen=True, slots=True)
class ServerCaches:
    """Makes servers of one size."""

    admission: Admission
    num_tokens: int
    num_slots: int
    scheduling: Scheduling = Scheduling()  # noqa: RUF009 - frozen

    def __call__(self, tree: RadixTree, eviction: Eviction) -> ServerReplay:
        """A server whose cache holds `tree` and evicts by `eviction`, which knows no node yet.

        Raises `ValueError` for fewer slots than a request takes, or a tree that holds more than the pools.
        """
        pools = Pools(self.num_tokens, self.num_slots)
        pools.num_free_tokens -= tree.num_tokens
        pools.num_free_slots -= tree.num_states
        if pools.num_free_tokens < 0 or pools.num_free_slots < 0:
            raise ValueError(
                f"a tree of {tree.num_tokens} tokens and {tree.num_states} states for pools of {self.num_tokens} and "
                f"{self.num_slots}; no more than the pools is right"
            )
        return ServerReplay(ServedTree(tree, self.admission, TieredEviction(eviction)), pools, self.scheduling)
