"""Two sides: evicts first the states that the next prompts of their conversations do not need.

A rule says how many tokens of a conversation are *needed* (`needed_tokens`). A state is free if the nearest shallower
state is at `needed` or beyond, so that evicting it leaves enough. Free states are evicted first and the needed ones
only when no free one is left, each side by LRU: the longest since a request ran through or ended there; of one time,
the deepest, which frees KV.

A side can change when a state nearby comes or goes (reported by `update`) and when its conversation gets longer (known
here): the ranked nodes of that one are ranked again before the next victim. Among leaves a conversation has one ranked
node. Beyond that, a victim costs O(log n).
"""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from marconi.policy.base import Eviction, Need, NodeView, Scope, for_states
from marconi.policy.eviction.conversation import Conversation, Conversations
from marconi.policy.eviction.order import VictimQueue
from marconi.policy.forecast.hazard import Floats
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
        self._settle()
        free, needed = self._sides[need]
        first = free.first()
        return needed.first() if first is None else first

    def worths(self, nodes: Sequence[NodeView], now_s: float) -> Floats:
        """The side, 0 if free and 1 if needed, the last use, and the depth, negated."""
        self._settle()
        free, needed = for_states(self._sides)
        rows = np.full((len(nodes), 3), np.nan)
        for number, side in enumerate((free, needed)):
            at = [index for index, node in enumerate(nodes) if node in side]
            if at:
                rows[at, 0], rows[at, 1:] = number, side.keys([nodes[index] for index in at])
        return rows

    def _settle(self) -> None:
        """Rank the nodes of conversations that have become longer again."""
        for conversation in self._unsettled:
            for node in conversation.ranked:
                self._rank(node, conversation)
        self._unsettled.clear()

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
