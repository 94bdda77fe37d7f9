"""The prefix cache of a replay: its budget may change while it runs.

Running requests hold KV and states of their own in the memory that the cache lives in. A queueing replay takes those
bytes from the budget when a request starts and gives them back when it ends.
"""

from marconi.policy.cache import Budget, PrefixCache


class ReplayCache(PrefixCache):
    """A prefix cache with a budget that follows what is left to it."""

    @property
    def num_states(self) -> int:
        """States held."""
        return self.tree.num_states

    def resize(self, budget: Budget, now_s: float) -> bool:
        """Take `budget` and evict until it is kept; False if what is locked exceeds it."""
        self.budget = budget
        return self._shrink(now_s)
