"""Stock SGLang 0.5.23 with memory taken as a server takes it, request after request.

As `server.py`, with stock's admission (`policy/admission/chunk_end.py`) and two orders of LRU, and with these
differences in how slots go:

- a chunk's state is a slot that the request has held: it gets another for it, evicting what it must, when the chunk
  joins the tree; what a finished request leaves is a slot of its own;
- where decoding is tracked, the last state is the one at the last multiple of the interval.

`test/engine/test_host_replay.py` holds it against the real cache. Sources: `srt/mem_cache/unified_radix_cache.py`,
`srt/mem_cache/unified_cache/components/mamba.py`.
"""

import math

from marconi.policy.admission.chunk_end import ExtraBuffer, NoBuffer
from marconi.policy.admission.prefill import PrefillPlan
from marconi.policy.eviction.base import Need
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.tiers import TieredEviction
from marconi.policy.forecast.turns import NO_CLOSING
from marconi.policy.request import Request
from marconi.policy.served import ServedTree
from marconi.replay.pools import Pools
from marconi.replay.server import Run, Scheduling, ServerReplay
from marconi.tree import RadixTree

TRACKING_SLOTS = 2
"""With overlap scheduling."""


class StockReplay(ServerReplay):
    """Serves requests one after the other as SGLang does."""

    def __init__(self, admission: ExtraBuffer | NoBuffer, pools: Pools, unit_tokens: int = 1) -> None:
        """`unit_tokens` is the trace's, and the page."""
        tiers = TieredEviction(SeparateLru(frozenset({Need.KV, Need.STATE})))
        served = ServedTree(RadixTree(unit_tokens), admission, tiers)
        super().__init__(served, pools, _scheduling(admission))

    def run(self, request: Request, now_s: float) -> "Run":
        """Begin `request`, for which there is room beside those that run."""
        return _StockRun(self, request, now_s)


def _scheduling(admission: ExtraBuffer | NoBuffer) -> Scheduling:
    if isinstance(admission, NoBuffer):
        return Scheduling(admission.chunk_tokens)
    track = math.lcm(admission.interval_tokens, admission.grid_tokens)
    return Scheduling(admission.chunk_tokens, 1 + TRACKING_SLOTS, track)


class _StockRun(Run):
    """A request that tracks states in slots of its own."""

    def _planned(self) -> PrefillPlan:
        return PrefillPlan(self._server.served.admission.depths(*self._lease))

    def _take_planned_slots(self, start: int, end: int) -> list[int]:
        return [depth for depth in self._plan.depths if start < depth <= end]

    def _leave_waiting(self) -> None:
        self._server.take_slots(len(self._waiting), self.now_s)
        super()._leave_waiting()

    def _num_slots_for_waiting(self) -> int:
        return 0

    def _closing(self) -> int:
        """Stock looks at no answer."""
        return NO_CLOSING
