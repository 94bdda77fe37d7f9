"""T-LRU, tail-optimised LRU (arXiv 2510.15152), and the two queues of its family.

Time to first token grows with the uncached tokens of a prompt, so a budget for it is a number of uncached tokens, xi.
A conversation of L tokens whose next prompt is expected to add Q to them meets it if

    needed = max(L + Q - xi, 0)

of its tokens are cached. What lies deeper is *free* (the paper's TEL-safe: its loss adds no tail excess latency). A
state is free if the nearest shallower state is at `needed` or beyond, so that evicting it leaves enough. Free states
go first and the needed ones only when no free one is left, each side by LRU: the longest since a request ran through
or ended there; of one time, the deepest, which gives back KV. With xi <= Q nothing is free, and the rule is LRU.

It is the same rule whether states are free of charge and stand at every block (attention only: leaf by leaf, the tail
of a conversation is trimmed block by block) or are few and dear (hybrid models: a tail goes back state by state).

SGLang 0.5.23 (`srt/mem_cache/evict_policy.py`, `TLRUStrategy`) agrees on `needed`, on the test (what is cached without
the node reaches `needed`), on L as a mark that trimming does not lower, and on LRU within each side. It differs where
several conversations share a node: its L is the deepest that any of them ever got to, here it is the length of the one
that left the state (`conversation.py`). It refuses xi <= Q, here that is LRU. vLLM's pull request 37825 fixes the side
of a block when its request ends, which is the same for a conversation that only grows.

A side can change when a state nearby comes or goes (reported by `update`) and when its conversation gets longer (known
here): the ranked nodes of that one are ranked again before the next victim. Among leaves a conversation has one ranked
node. Beyond that, a victim costs O(log n).
"""

import math
from abc import abstractmethod
from collections.abc import Sequence

from marconi.policy.base import Eviction, Need, NodeView, Scope
from marconi.policy.eviction.conversation import Conversation, Conversations
from marconi.policy.eviction.queue import VictimQueue
from marconi.policy.request import Lease, Request


class TailOptimizedEviction(Eviction):
    """Evicts what the next prompts can do without, then the least recently used."""

    scope = Scope.LEAVES

    def __init__(self, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        self.conversations = Conversations()
        self._sides = {
            need: (VictimQueue(), VictimQueue()) for need in sorted(needs, key=lambda need: need.value)
        }  # free, needed
        self._unsettled: dict[Conversation, None] = {}

    @abstractmethod
    def next_prompt_tokens(self, conversation: Conversation, request: Request) -> float | None:
        """Expected tokens of the next prompt of `conversation`, which `request` has just made longer; None if none."""

    @abstractmethod
    def needed_tokens(self, conversation: Conversation) -> float:
        """Tokens of `conversation` that must stay cached; a function of its lengths alone."""

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """Make the conversations of `nodes` longer."""
        for node in nodes:
            conversation = self.conversations.admitted(node)
            if conversation is not None:
                conversation.next_prompt_tokens = self.next_prompt_tokens(conversation, lease.request)
                conversation.needed_tokens = None
                self._unsettled[conversation] = None

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Take `node` out of its conversation."""
        self.conversations.drop(node)

    def update(self, node: NodeView) -> None:
        """Put `node` on its side."""
        conversation = self.conversations.of(node)
        assert conversation is not None, f"{node} was never admitted"
        conversation.ranked[node] = None
        self._rank(node, conversation)

    def discard(self, node: NodeView) -> None:
        """Take `node` off both sides."""
        for free, needed in self._sides.values():
            free.discard(node)
            needed.discard(node)
        conversation = self.conversations.of(node)
        if conversation is not None:
            conversation.ranked.pop(node, None)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The least recently used of the free nodes, or else of the others; `KeyError` for a need not asked for."""
        for conversation in self._unsettled:
            for node in conversation.ranked:
                self._rank(node, conversation)
        self._unsettled.clear()
        free, needed = self._sides[need]
        first = free.first()
        return needed.first() if first is None else first

    def _rank(self, node: NodeView, conversation: Conversation) -> None:
        if conversation.needed_tokens is None:
            conversation.needed_tokens = self.needed_tokens(conversation)
        is_free = node.checkpoint_depth_above >= conversation.needed_tokens
        key = (node.last_pass_s, -node.depth)
        for need, (free, needed) in self._sides.items():
            if need is Need.KV and node.num_children:
                free.discard(node)
                needed.discard(node)
            elif is_free:
                needed.discard(node)
                free.put(node, key)
            else:
                free.discard(node)
                needed.put(node, key)


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
        raise ValueError(f"{name} is {value}; a finite number of tokens, 0 or more, is right")
    return value
