"""Coverage thinning (after SGLang pull request 38000): the LRU tail says whose path, coverage says which state.

Chunked prefill leaves a state at every chunk, oldest at the shallow end, so plain LRU drops a path's states shallow
first and leaves none where another request may branch off. Thinning keeps a path covered instead:

1. the state hit or made the longest ago says which path is thinned: that of its conversation
   (`policy/eviction/conversation.py`);
2. of the evictable states there, evict the one whose loss would leave the smallest gap, in tokens, between the state
   above it and the next deeper one of its conversation:

       gap(n) = depth of the next deeper state - depth of the nearest shallower state

   The end of a conversation has no deeper state and is evicted last. Of equal gaps, the state made first is evicted.

A path of states every k tokens is thus left with one every 2k, then every 4k, and its end; that agrees with the hits
that the pull request prints (28672 and then 16384 of 32768 tokens in chunks of 2048). What is printed there is the
evidence for step 2 and for the end being last; that the LRU tail picks the path is our reading of its title.
A state with several children is a branch point, and is out of scope.

When KV alone is short, states are not the matter: the leaf through which no request has run for longest is evicted.

A gap changes when the states around it do: the one above is reported, the deeper one is known from the conversation.
Two queues, by age and, for each conversation, by gap, make a victim O(log n).
"""

import math
from collections.abc import Sequence

import numpy as np

from marconi.policy.base import Eviction, Need, NodeView
from marconi.policy.eviction.conversation import Conversation, Conversations
from marconi.policy.eviction.order import VictimQueue
from marconi.policy.forecast.hazard import Floats
from marconi.policy.request import Lease


class CoverageEviction(Eviction):
    """Thins the path of the least recently used state."""

    def __init__(self, needs: frozenset[Need] = frozenset({Need.BYTES})) -> None:
        self._needs = needs
        self._conversations = Conversations()
        self._by_age = VictimQueue()
        self._leaves = VictimQueue()
        self._by_gap: dict[Conversation, VictimQueue] = {}

    def admitted(self, nodes: Sequence[NodeView], lease: Lease, now_s: float) -> None:
        """Lengthen conversations: what was the end of one has a deeper state now."""
        for node in nodes:
            conversation = self._conversations.admitted(node)
            if conversation is not None:
                self._rank_again(conversation.shallower(node), conversation)

    def evicting(self, node: NodeView, now_s: float) -> None:
        """Take `node` out of its conversation, which leaves a gap above it."""
        conversation = self._conversations.of(node)
        assert conversation is not None
        shallower = conversation.shallower(node)
        self._unrank(node, conversation)
        self._conversations.drop(node)
        self._rank_again(shallower, conversation)

    def update(self, node: NodeView) -> None:
        """Rank `node` anew."""
        conversation = self._conversations.of(node)
        assert conversation is not None, f"{node} was never admitted"
        self._by_age.put(node, node.last_hit_s)
        self._by_gap.setdefault(conversation, VictimQueue()).put(node, self._gap_tokens(node, conversation))
        if node.num_children:
            self._leaves.discard(node)
        else:
            self._leaves.put(node, node.last_pass_s)

    def discard(self, node: NodeView) -> None:
        """Forget its rank."""
        conversation = self._conversations.of(node)
        if conversation is not None:
            self._unrank(node, conversation)

    def worths(self, nodes: Sequence[NodeView], now_s: float) -> Floats:
        """The oldest hit on the path and which state has it, and the gap, as they are before the first eviction."""
        oldest: dict[Conversation, tuple[float, float]] = {}
        rows = np.full((len(nodes), 3), np.nan)
        for at, node in enumerate(nodes):
            if node in self._by_age:
                conversation = self._conversations.of(node)
                assert conversation is not None
                if conversation not in oldest:
                    oldest[conversation] = min((each.last_hit_s, each.serial) for each in self._by_gap[conversation])
                rows[at] = *oldest[conversation], self._gap_tokens(node, conversation)
        return rows

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        """The state that its path misses least, or the oldest leaf; `KeyError` for a need not asked for."""
        if need not in self._needs:
            raise KeyError(need)
        if need is Need.KV:
            return self._leaves.first()
        oldest = self._by_age.first()
        if oldest is None:
            return None
        conversation = self._conversations.of(oldest)
        assert conversation is not None
        return self._by_gap[conversation].first()

    def _unrank(self, node: NodeView, conversation: Conversation) -> None:
        self._by_age.discard(node)
        self._leaves.discard(node)
        queue = self._by_gap.get(conversation)
        if queue is not None:
            queue.discard(node)
            if not len(queue):
                del self._by_gap[conversation]

    def _gap_tokens(self, node: NodeView, conversation: Conversation) -> float:
        deeper = conversation.deeper(node)
        return math.inf if deeper is None else deeper.depth - node.checkpoint_depth_above

    def _rank_again(self, node: NodeView | None, conversation: Conversation) -> None:
        queue = self._by_gap.get(conversation)
        if node is not None and queue is not None and node in queue:
            queue.put(node, self._gap_tokens(node, conversation))
