"""Threshold-LRU (a baseline of arXiv 2510.15152): only conversations longer than a threshold are worth caching.

    needed = L if L > threshold, else 0

Shorter conversations are free as a whole and evicted first; of the longer ones every state is needed. Each side is
evicted by LRU (`policy/eviction/tail_optimized.py`). Providers that do not cache short prompts at all (a usual bound is
a thousand tokens) do so by admission; with eviction, short ones may still use memory that no other one needs.
"""

from marconi.policy.base import Need
from marconi.policy.eviction.conversation import Conversation
from marconi.policy.eviction.tail_optimized import TailOptimizedEviction
from marconi.policy.request import Request
from marconi_lab.eviction.tlru import at_least_zero


class ThresholdLru(TailOptimizedEviction):
    """Short conversations first."""

    def __init__(self, threshold_tokens: int, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        """Conversations of no more than `threshold_tokens` are free; `ValueError` if it is negative."""
        super().__init__(needs)
        self._threshold_tokens = at_least_zero("threshold_tokens", threshold_tokens)

    def next_prompt_tokens(self, conversation: Conversation, request: Request) -> float | None:
        """No shorter than the conversation is now."""
        return conversation.num_tokens

    def needed_tokens(self, conversation: Conversation) -> float:
        """All or nothing."""
        return conversation.num_tokens if conversation.num_tokens > self._threshold_tokens else 0
