"""LRU of SGLang+, a baseline of the Marconi paper (section 5.1).

One budget, leaves only, and a hit refreshes the whole path.
"""

from marconi.policy.base import NodeView, Scope
from marconi.policy.eviction.ranked import RankedEviction


class JointLru(RankedEviction):
    """Leaves, by last pass."""

    scope = Scope.LEAVES

    def worth(self, node: NodeView) -> float:
        """When a request last ran through it."""
        return node.last_pass_s
