"""Marconi with the alpha of its paper, tuned once while it serves (section 4.2, *Managing the balance*).

    requests    1 .. n             n + 1 .. n + m * n                 later ones
    alpha       0: recency alone   0, the bootstrap window            the one of a grid that is best on the window

Request n is the first that evicts; m is 5 to 15 by the paper, 5 in its published artifact. Then the requests of the
window are replayed with each alpha, from the tree as it was when the window began, and the alpha that hits the most
tokens is adopted for good; of equals the lowest.

The paper searches on other cores while requests run and gives no grid; here the next request waits, in no time of the
trace. Its artifact compares FLOPs in place of hits, from an empty tree, over a window that counts from request 1.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from marconi.policy.base import Costs, Need, NodeView
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.request import Request

LEAST_MULTIPLE: Final = 5
GREATEST_MULTIPLE: Final = 15
"""Bounds of the window, in numbers of requests until the first eviction."""

HitTokens: TypeAlias = Callable[[Sequence[Request], Sequence[Request], float], int]
"""Tokens hit by the second requests with this alpha, after the first ones were served with alpha 0."""


class TunedUtilityEviction(UtilityEviction):
    """Recency and FLOP efficiency, weighed by what would have hit most."""

    def __init__(
        self,
        costs: Costs,
        alphas: Sequence[float],
        multiple: int = LEAST_MULTIPLE,
        needs: frozenset[Need] = frozenset({Need.BYTES}),
    ) -> None:
        """`alphas` is the grid, in rising order; `ValueError` for a window that is not the paper's."""
        if not LEAST_MULTIPLE <= multiple <= GREATEST_MULTIPLE:
            raise ValueError(f"MULTIPLE must be {LEAST_MULTIPLE} to {GREATEST_MULTIPLE}, got {multiple}")
        super().__init__(costs, 0.0, needs)
        self._alphas = alphas
        self._multiple = multiple
        self._requests: list[Request] = []
        """All until the alpha is adopted, in order of their beginning."""
        self.num_before: int | None = None
        """Requests until the first eviction, the one that evicts included; None before it."""
        self.is_tuned = False

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Note the first eviction."""
        if self.num_before is None:
            self.num_before = len(self._requests)

    def coming(self, request: Request, hit_tokens: HitTokens) -> None:
        """`request` begins next; if the window is full, adopt the best alpha for it."""
        if self.is_tuned:
            return
        before = self.num_before
        if before is None or len(self._requests) < before * (1 + self._multiple):
            self._requests.append(request)
            return
        first, window = self._requests[:before], self._requests[before:]
        self.weight = max(self._alphas, key=lambda alpha: hit_tokens(first, window, alpha))
        self.is_tuned = True
        self._requests = []
