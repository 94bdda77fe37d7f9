"""A server whose rule tunes its alpha by replays of the requests that it has served.

No tree is copied: nothing was evicted before the bootstrap window but by its last request before, with alpha 0, so a
new server that serves the same requests with alpha 0 holds the tree as it was when the window began. It serves them
one after the other, at their arrivals, also where this server runs them beside each other.
"""

from collections.abc import Sequence
from typing import Final

from marconi.policy.catalog import PolicySpec
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Request
from marconi.replay.catalog import Another
from marconi.replay.pools import Pool
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ReplayedRequest, ServerReplay
from marconi_lab.eviction.tuned import TunedUtilityEviction

_FIXED: Final = PolicySpec("marconi-static", "0")


class TunedServer(ServerReplay):
    """Serves requests by a rule that is tuned."""

    def __init__(self, hybrid: HybridCache, pools: Pool, scheduling: Scheduling, another: Another) -> None:
        """`another` makes an empty server of the same memory."""
        super().__init__(hybrid, pools, scheduling)
        assert isinstance(hybrid.order.rule, TunedUtilityEviction)
        self.rule: TunedUtilityEviction = hybrid.order.rule
        self._another = another

    @property
    def chosen(self) -> str | None:
        """The alpha that was adopted; None before."""
        return f"alpha {self.rule.weight:g}" if self.rule.is_tuned else None

    def run(self, request: Request, now_s: float) -> ReplayedRequest:
        """Begin `request`, by the alpha that is adopted then."""
        self.rule.coming(request, self._hit_tokens)
        return super().run(request, now_s)

    def _hit_tokens(self, first: Sequence[Request], window: Sequence[Request], alpha: float) -> int:
        server = self._another(_FIXED)
        for request in first:
            server.serve(request)
        rule = server.hybrid.order.rule
        assert isinstance(rule, UtilityEviction)
        rule.weight = alpha
        return sum(map(server.serve, window))
