"""A state at every block: vLLM+ of the Marconi paper (sections 3 and 5.1).

Every multiple of `block_tokens` tokens that the model processes gets a state, beyond the one that the request starts
from; what follows the last full block gets none. The paper's baseline uses 32 tokens, vLLM's own blocks for hybrid
models are 528 tokens and more. Where blocks are no multiples of `grid_tokens`, a state stands at the last position on
the grid before a block's end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from marconi.policy.request import Request
from marconi.tree import Match


@dataclass(frozen=True, slots=True)
class EveryBlock:
    """The end of every full block, cut to the grid; both are multiples of the trace's unit."""

    block_tokens: int = 32
    grid_tokens: int = 1
    """1 is exact."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a block or a grid below one token."""
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens must be 1 or more, got {self.block_tokens}")
        if self.grid_tokens < 1:
            raise ValueError(f"grid_tokens must be 1 or more, got {self.grid_tokens}")

    plans_ahead: ClassVar[bool] = False

    def depths(self, request: Request, match: Match) -> Sequence[int]:
        """Every multiple of the block beyond the hit, on the grid."""
        block, grid, hit = self.block_tokens, self.grid_tokens, match.checkpoint.depth
        first = hit // block * block + block
        ends = range(first, request.last_known_depth(block) + 1, block)
        if block % grid == 0:
            return ends
        return [depth for depth in dict.fromkeys(end // grid * grid for end in ends) if depth > hit]
