"""A state at every block: vLLM+ of the Marconi paper (sections 3 and 5.1).

Every multiple of `block_tokens` tokens that the model processes gets a state, beyond the one that the request starts
from; what follows the last full block gets none. The paper's baseline uses 32 tokens, vLLM's own blocks for hybrid
models are 528 tokens and more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from marconi.policy.admission.base import last_known_depth
from marconi.policy.request import Request
from marconi.tree import Match


@dataclass(frozen=True, slots=True)
class EveryBlock:
    """The end of every full block; `block_tokens` is a multiple of the trace's unit."""

    block_tokens: int = 32

    def __post_init__(self) -> None:
        """Raise `ValueError` for a block below one token."""
        if self.block_tokens < 1:
            raise ValueError(f"a block of {self.block_tokens} tokens; at least 1 is right")

    def depths(self, request: Request, match: Match) -> Sequence[int]:
        """Every multiple of the block beyond the hit."""
        block = self.block_tokens
        first = match.checkpoint.depth // block * block + block
        return range(first, last_known_depth(request, block) + 1, block)
