"""T-LRU, tail-optimised LRU (arXiv 2510.15152).

Time to first token grows with the uncached tokens of a prompt, so a budget for it is a number of uncached tokens, xi.
A conversation of L tokens whose next prompt is expected to add Q to them meets it if

    needed = max(L + Q - xi, 0)

of its tokens are cached. What lies deeper is *free* (the paper's TEL-safe: its loss adds no tail excess latency) and
evicted first (`policy/eviction/tail_optimized.py`). With xi <= Q nothing is free, and the rule is LRU.

It is the same rule whether states are free of charge and stand at every block (attention only: leaf by leaf, the tail
of a conversation is trimmed block by block) or are few and dear (hybrid models: a tail is trimmed state by state).

SGLang 0.5.23 (`srt/mem_cache/evict_policy.py`, `TLRUStrategy`) agrees on `needed`, on the test (what is cached without
the node reaches `needed`), on L as a mark that trimming does not lower, and on LRU within each side. It differs where
several conversations share a node: its L is the deepest that any of them ever got to, here it is the length of the one
that left the state (`policy/eviction/conversation.py`). It refuses xi <= Q, here that is LRU. vLLM's pull request 37825
fixes the side of a block when its request ends, which is the same for a conversation that only grows.
"""

import math

from marconi.policy.base import Need
from marconi.policy.eviction.conversation import Conversation
from marconi.policy.eviction.tail_optimized import TailOptimizedEviction
from marconi.policy.request import Request


class TailOptimizedLru(TailOptimizedEviction):
    """T-LRU with a fixed budget and a fixed estimate of what the next prompt adds."""

    def __init__(
        self, budget_tokens: int, added_tokens: int = 0, needs: frozenset[Need] = frozenset({Need.BYTES})
    ) -> None:
        """A budget of `budget_tokens` uncached tokens (xi) and prompts that add `added_tokens` (Q).

        `ValueError` if either is negative.
        """
        super().__init__(needs)
        self._budget_tokens = at_least_zero("budget_tokens", budget_tokens)
        self._added_tokens = at_least_zero("added_tokens", added_tokens)

    def next_prompt_tokens(self, conversation: Conversation, request: Request) -> float | None:
        """L + Q."""
        return conversation.num_tokens + self._added_tokens

    def needed_tokens(self, conversation: Conversation) -> float:
        """Tokens that a next prompt leaves beyond the budget; 0 if there is none."""
        if conversation.next_prompt_tokens is None:
            return 0
        return max(conversation.next_prompt_tokens - self._budget_tokens, 0)


def at_least_zero(name: str, value: int) -> int:
    """`value`, a count of tokens; `ValueError`, naming it, if it is negative or not finite."""
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and >= 0 tokens, got {value}")
    return value
