"""Length-aware T-LRU (arXiv 2510.15152): T-LRU that knows the next prompt's length.

    needed = max(P - xi, 0) with P the tokens of the next prompt, in place of L + Q; 0 if there is none

To know the length of what comes is to know when nothing comes, so this rule knows the end as well (our reading). The
knowledge is hindsight, taken from the trace (`end_aware.py`).
"""

from marconi.policy.base import Need
from marconi.policy.eviction.conversation import Conversation
from marconi.policy.request import Request
from marconi_lab.eviction.end_aware import NextPrompt
from marconi_lab.eviction.tlru import TailOptimizedLru


class LengthAwareLru(TailOptimizedLru):
    """T-LRU with the true next prompt."""

    def __init__(
        self, next_prompt: NextPrompt, budget_tokens: int, needs: frozenset[Need] = frozenset({Need.BYTES})
    ) -> None:
        """A budget of `budget_tokens` uncached tokens; `ValueError` if it is negative."""
        super().__init__(budget_tokens, needs=needs)
        self._next_prompt = next_prompt

    def next_prompt_tokens(self, conversation: Conversation, request: Request) -> float | None:
        """The true length, None at the end."""
        return self._next_prompt(request)
