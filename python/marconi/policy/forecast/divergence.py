"""How far before its end a path is left: where a second state is worth having.

A prompt that shares all but the end of an earlier one (the same document, another question; a template whose last
lines are dropped) finds no state where it leaves that path, for none stood there the first time. If such distances
repeat, a state kept `distance_tokens` before the end, a *guard*, would have served.

A loss is (d, t): a prompt left a path d tokens before the path's next state and had to compute t tokens of what it
shared. A guard at distance g would have saved t - (g - d) of it if d <= g < d + t. The distance is the g, of those
seen, that would have saved most over the window; the gain is what it would have saved a request.

Losses are counted as if no guards were there, or a good guard would take away the reason for itself: one that a guard
has saved is a loss all the same.
"""

from collections import deque
from typing import Final

import numpy as np

WINDOW_REQUESTS: Final = 2048
MAX_LOSSES: Final = 512
"""Where there are more, the window is as much shorter."""
MAX_DISTANCES: Final = 64
"""Distances tried, the shortest first: a state far from the end is a branch point's business."""
REQUESTS_A_CHOICE: Final = 64


class DivergenceWindow:
    """The losses of the last requests, and the guard that would have saved most of them."""

    __slots__ = ("_losses", "_num_requests", "distance_tokens", "gain_tokens")

    def __init__(self) -> None:
        self._losses: deque[tuple[int, int, int]] = deque(maxlen=MAX_LOSSES)
        self._num_requests = 0
        self.distance_tokens = 0
        """Where a guard should stand, before the end; 0 while none is worth it."""
        self.gain_tokens = 0.0
        """Tokens a request that such guards would have saved."""

    def observe(self, distance_tokens: int, lost_tokens: int) -> None:
        """A request came; it left a known path `distance_tokens` before its next state, 0 if it did not."""
        self._num_requests += 1
        if distance_tokens > 0 and lost_tokens > 0:
            self._losses.append((self._num_requests, distance_tokens, lost_tokens))
        if self._num_requests % REQUESTS_A_CHOICE == 0:
            self._choose()

    def _choose(self) -> None:
        losses = self._losses
        num_requests = min(self._num_requests, WINDOW_REQUESTS)
        while losses and losses[0][0] <= self._num_requests - num_requests:
            losses.popleft()
        self.distance_tokens, self.gain_tokens = 0, 0.0
        if losses:
            if len(losses) == MAX_LOSSES:
                num_requests = self._num_requests + 1 - losses[0][0]
            _, distances, lost = np.array(losses).T
            guards = np.unique(distances)[:MAX_DISTANCES]
            further = guards[:, None] - distances
            saved = np.where((further >= 0) & (further < lost), lost - further, 0).sum(axis=1)
            best = int(saved.argmax())
            self.distance_tokens = int(guards[best])
            self.gain_tokens = int(saved[best]) / num_requests
