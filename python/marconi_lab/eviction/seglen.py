"""SegLen (SGLang pull request 22172): recency plus the length that would have to be replayed without the state.

The benefit of a node is its distance in tokens to the nearest shallower state; both terms weigh the same.
"""

from marconi.policy.base import Need, NodeView
from marconi.policy.eviction.classed import ClassedEviction


class SegmentLengthEviction(ClassedEviction):
    """Recency and segment length."""

    def __init__(self, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        super().__init__(1.0, needs)

    def benefit(self, node: NodeView) -> float:
        """Tokens to the nearest shallower state."""
        return float(node.depth - node.checkpoint_depth_above)
