"""Tail-optimised Belady (arXiv 2510.15152): evicts the states that the tail can spare, then the furthest next use.

A prompt of P tokens is in time if no more than xi of them are uncached. A state at depth c, above which the nearest is
at c', is *free* if the next prompt that would start from it is in time without it:

    P - c' <= xi, or no prompt will come

Free states are evicted first, the ones that free most before the others; then the furthest next use. For attention
alone, block by block, that is the hindsight optimum of the paper; for states of a size it is a strong reference.
"""

import math

from marconi.policy.base import Costs, Need, NodeView
from marconi_lab.eviction.tlru import at_least_zero
from marconi_lab.hindsight.belady import BeladyEviction
from marconi_lab.hindsight.future import Future


class TailBeladyEviction(BeladyEviction):
    """Free states first, then the furthest next use."""

    def __init__(
        self,
        costs: Costs,
        future: Future,
        budget_tokens: int,
        needs: frozenset[Need] = frozenset({Need.BYTES}),
    ) -> None:
        """A budget of `budget_tokens` uncached tokens (xi); `ValueError` if it is negative."""
        super().__init__(costs, future, needs)
        self._budget_tokens = at_least_zero("budget_tokens", budget_tokens)

    def worth(self, node: NodeView) -> tuple[float, ...]:
        """Rank free states below all others, by the bytes they free; the others by their next use."""
        next_use = self.next_use(node)
        if math.isinf(next_use) or self._is_spared(node, int(next_use)):
            return 0.0, -float(self._costs.freed_bytes(node))
        return 1.0, -next_use

    def _is_spared(self, node: NodeView, index: int) -> bool:
        prompt = self._future.requests[index].num_prompt_tokens
        return prompt - node.checkpoint_depth_above <= self._budget_tokens
