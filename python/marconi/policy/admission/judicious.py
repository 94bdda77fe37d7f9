"""Marconi's admission (section 4.1): at most two states a request, where reuse is likely.

- Prefixes of inputs are discovered by speculative insertion: if the prompt, from its second occurrence on, leaves what
  is known in the middle of an edge or at a node from which something else goes on, others will branch there too, and
  the state at that point is kept.
- A conversation goes on from its last decoded token, so the state there is kept.

A prompt known as a whole has its branch point at most one token before its end: the last token is always recomputed
for its logits. Depths are cut to `grid_tokens`, 1 being exact; a grid is a multiple of the trace's unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from marconi.policy.admission.base import last_known_depth
from marconi.policy.request import Request
from marconi.tree import Match


@dataclass(frozen=True, slots=True)
class Judicious:
    """The branch point, if the tree or a ghost knows one, and the last decoded token."""

    grid_tokens: int = 1

    def __post_init__(self) -> None:
        """Raise `ValueError` for a grid below one token."""
        if self.grid_tokens < 1:
            raise ValueError(f"grid_tokens must be 1 or more, got {self.grid_tokens}")

    plans_ahead: ClassVar[bool] = True

    def depths(self, request: Request, match: Match) -> Sequence[int]:
        """The branch point and the end, as far as they lie beyond the hit."""
        grid, hit = self.grid_tokens, match.checkpoint.depth
        end = last_known_depth(request, grid)
        seen = match.num_seen_tokens
        if seen > hit and (match.diverges or seen >= request.num_prompt_tokens):
            branch = min(seen, request.num_prompt_tokens - 1) // grid * grid
            if hit < branch < end:
                return (branch, end)
        return (end,) if end > hit else ()
