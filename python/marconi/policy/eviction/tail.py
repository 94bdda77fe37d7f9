"""Tail: T-LRU for hybrid models, with its budget in seconds.

Of a conversation, keep the shallowest state that meets the budget for time to first token; everything deeper is free
to evict. With L the length of the conversation, Q what its next prompt is expected to add, and t(c, p) the time to
first token of a prompt of p tokens of which c are cached,

    needed = the least c in 0 .. L with t(c, L + Q) <= budget_s; L if there is none

and the *keeper* is the shallowest state at `needed` or beyond. What is deeper is free: its nearest shallower state is
at `needed` or beyond. Free states are evicted first, needed ones when no free one is left, both the longest unused
first and, of one time, the deepest (`tail_optimized.py`). No request is late for want of a free state; a conversation
silent for longest is the least likely to miss it. States of earlier turns, shallower than the keeper, are no use to
their own conversation but may be to others that branch off there, so they stay needed and age by their own last use,
which is older than that of the keeper. Freeing them at once made the tail worse on recorded agent sessions.

The least c is passed in as a function, from the cost model (`marconi.model.latency`) or a measured table. Seconds
count what tokens do not: the quadratic part of attention makes an uncached token late in a long prompt dearer than
one in a short prompt, so long conversations keep more.

Q is estimated, not known: the mean growth of the conversation's own prompts beyond its length; before its second
prompt, the mean over all conversations so far; 0 at the very start. The estimate is taken when the conversation gets
a state and stands until it gets another.

Interior states are evictable, so states must have a size: where they are free of charge, evicting one gives back
nothing and T-LRU (`marconi_lab/eviction/tlru.py`) is right.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

from marconi.policy.base import Need, Scope
from marconi.policy.eviction.conversation import Conversation
from marconi.policy.eviction.tail_optimized import TailOptimizedEviction
from marconi.policy.request import Lease, Request

SmallestCachedTokens: TypeAlias = Callable[[int, float], int | None]
"""The fewest cached tokens with which a prompt of so many tokens takes at most so many seconds; None if none do."""


class TailEviction(TailOptimizedEviction):
    """Frees what is deeper than the next prompts need to be in time."""

    scope = Scope.SINGLE_CHILD

    def __init__(
        self,
        smallest_cached_tokens: SmallestCachedTokens,
        budget_s: float,
        needs: frozenset[Need] = frozenset({Need.BYTES}),
    ) -> None:
        """A budget of `budget_s` seconds to the first token; `ValueError` if it is negative or not a number."""
        if not budget_s >= 0:
            raise ValueError(f"budget_s must be >= 0 s to the first token, got {budget_s}")
        super().__init__(needs)
        self._smallest_cached_tokens = smallest_cached_tokens
        self._budget_s = budget_s
        self._num_growths = 0
        self._grown_tokens = 0

    def arrived(self, lease: Lease, now_s: float) -> None:
        """Note by how much the prompt is longer than the conversation that it continues."""
        conversation = None if lease.match.source is None else self.conversations.ending_at(lease.match.source)
        if conversation is None:
            return
        grown = lease.request.num_prompt_tokens - conversation.num_tokens
        if grown > 0:
            conversation.num_growths += 1
            conversation.grown_tokens += grown
            self._num_growths += 1
            self._grown_tokens += grown

    def next_prompt_tokens(self, conversation: Conversation, request: Request) -> float | None:
        """L + Q."""
        if conversation.num_growths:
            return conversation.num_tokens + conversation.grown_tokens / conversation.num_growths
        return conversation.num_tokens + (self._grown_tokens / self._num_growths if self._num_growths else 0)

    def needed_tokens(self, conversation: Conversation) -> float:
        """The least cached tokens that meet the budget."""
        length = conversation.num_tokens
        assert conversation.next_prompt_tokens is not None
        found = self._smallest_cached_tokens(math.ceil(conversation.next_prompt_tokens), self._budget_s)
        return length if found is None else min(found, length)
