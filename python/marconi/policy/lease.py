"""A request that has been looked up, from its start to its end."""

from typing import NamedTuple

from marconi.policy.request import Request
from marconi.tree import Match, Node


class Lease(NamedTuple):
    """What came, and what the tree knew of it when it came."""

    request: Request
    match: Match

    @property
    def source(self) -> Node | None:
        """The state that the request starts from, locked while it runs; None if it starts from nothing."""
        checkpoint = self.match.checkpoint
        return checkpoint if checkpoint.depth else None

    @property
    def missed(self) -> Node | None:
        """The evicted state that the request would have started from, if it lies beyond the one that it does."""
        ghost = self.match.ghost
        return ghost if ghost is not None and ghost.depth > self.match.checkpoint.depth else None
