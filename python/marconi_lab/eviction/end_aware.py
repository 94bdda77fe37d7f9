"""End-aware T-LRU (arXiv 2510.15152): T-LRU that knows whether a conversation continues.

    needed = max(L + Q - xi, 0) if another prompt will come, else 0

An ended conversation is free as a whole. The knowledge is hindsight, taken from the trace; a bound on what hints from
clients ("this was the last turn") could win.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from marconi.policy.base import Need
from marconi.policy.eviction.conversation import Conversation
from marconi.policy.request import Request
from marconi_lab.eviction.tlru import TailOptimizedLru

NextPrompt: TypeAlias = Callable[[Request], int | None]
"""Tokens of the next prompt of a request's session, None if the session ends with it."""


class NextPrompts:
    """A `NextPrompt` read off a trace: the next request, in order of arrival, of the same session.

    A request outside any session ends its own.
    """

    def __init__(self, requests: Iterable[Request]) -> None:
        """`ValueError` if no request names a session."""
        latest: dict[int, int] = {}
        self._next: dict[tuple[int, int, float], int | None] = {}
        for request in reversed(list(requests)):
            if request.session >= 0:
                self._next[request.session, request.turn, request.arrival_s] = latest.get(request.session)
                latest[request.session] = request.num_prompt_tokens
        if not latest:
            raise ValueError("no request names its session: a rule that looks ahead needs a trace with sessions")

    def __call__(self, request: Request, /) -> int | None:
        """Tokens of the prompt after `request`; `KeyError` for a request of a session that the trace does not have."""
        if request.session < 0:
            return None
        return self._next[request.session, request.turn, request.arrival_s]


class EndAwareLru(TailOptimizedLru):
    """T-LRU that frees a conversation when it has ended."""

    def __init__(
        self,
        next_prompt: NextPrompt,
        budget_tokens: int,
        added_tokens: int = 0,
        needs: frozenset[Need] = frozenset({Need.BYTES}),
    ) -> None:
        """Take T-LRU's parameters and what comes next; `ValueError` for negative counts."""
        super().__init__(budget_tokens, added_tokens, needs)
        self._next_prompt = next_prompt

    def next_prompt_tokens(self, conversation: Conversation, request: Request) -> float | None:
        """L + Q, or None at the end."""
        if self._next_prompt(request) is None:
            return None
        return super().next_prompt_tokens(conversation, request)
