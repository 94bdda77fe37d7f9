"""Judicious admission with a guard: a second state a little before the end, where paths turn out to be left.

To Marconi's two (`judicious.py`) a guard is added `distance_tokens` before the end (`forecast/divergence.py`), as long
as the guards are worth their memory: a guard takes one state, and has to save, a request, at least `MIN_GAIN` of the
tokens whose KV would take as much. It is a low bar on purpose, for eviction weighs each guard by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from marconi.policy.admission.judicious import Judicious
from marconi.policy.eviction.base import Costs
from marconi.policy.forecast.divergence import DivergenceWindow
from marconi.policy.request import Request
from marconi.tree import Match

MIN_GAIN: Final = 0.02


@dataclass(frozen=True, slots=True)
class Guarded:
    """The branch point, the guard and the last decoded token."""

    judicious: Judicious
    divergence: DivergenceWindow
    costs: Costs

    plans_ahead: ClassVar[bool] = True

    def depths(self, request: Request, match: Match) -> Sequence[int]:
        """As `judicious`, with a guard where there is room for one."""
        depths = self.judicious.depths(request, match)
        distance = self.divergence.distance_tokens
        if not depths or not distance:
            return depths
        if self.divergence.gain_tokens * self.costs.kv_bytes_per_token < MIN_GAIN * self.costs.state_bytes:
            return depths
        grid = self.judicious.grid_tokens
        guard = (depths[-1] - distance) // grid * grid
        above = depths[-2] if len(depths) > 1 else match.checkpoint.depth
        return (*depths[:-1], guard, depths[-1]) if guard > above else depths
