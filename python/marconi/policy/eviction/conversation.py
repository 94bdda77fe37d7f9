"""Which conversation a state belongs to, from requests and the states they leave alone.

A *conversation* is a run of states on one path, rising in depth, each left by a request that resumed from the
one before it. A new state follows the nearest one above it, which its request left before or started from; it

- joins the conversation of the state it follows, if that is the deepest held one there,
- and otherwise, or if it follows none, begins a conversation: that one already has a deeper state.

So the state at the end of a shared prompt belongs to whoever left it, and the conversations that branch off there are
others. Where a tail was trimmed and the conversation comes back, it resumes from the rest and stays the same
conversation.

The length of a conversation is the depth of the last state it was given. It does not fall when states are evicted: a
length that shrank with what is held would let every trimming justify the next, down to nothing.

A state that is left again while it is held stays where it is.
"""

from bisect import bisect_left

from marconi.policy.base import NodeView


class Conversation:
    """The states of one conversation, and what a rule notes of it."""

    __slots__ = (
        "grown_tokens",
        "needed_tokens",
        "next_prompt_tokens",
        "num_growths",
        "num_tokens",
        "ranked",
        "states",
    )

    def __init__(self) -> None:
        self.states: list[NodeView] = []
        """Those held, in rising depth."""
        self.ranked: dict[NodeView, None] = {}
        """Those that are evictable now."""
        self.num_tokens = 0
        """Its length: the depth of the last state it was given."""
        self.next_prompt_tokens: float | None = None
        """Expected length of its next prompt when it was last given a state; None if it does not continue."""
        self.needed_tokens: float | None = None
        """Tokens that must be cached for the next prompt; None until worked out."""
        self.num_growths = 0
        """Prompts that continued it from its end and were longer."""
        self.grown_tokens = 0
        """Tokens by which they were longer than the conversation then was, in all."""

    def deeper(self, node: NodeView) -> NodeView | None:
        """The next deeper state held, if any."""
        index = bisect_left(self.states, node.depth, key=_depth) + 1
        return self.states[index] if index < len(self.states) else None

    def shallower(self, node: NodeView) -> NodeView | None:
        """The next shallower state held, if any."""
        index = bisect_left(self.states, node.depth, key=_depth)
        return self.states[index - 1] if index else None


def _depth(node: NodeView) -> int:
    return node.depth


class Conversations:
    """The conversation of every held state."""

    __slots__ = ("_of",)

    def __init__(self) -> None:
        self._of: dict[NodeView, Conversation] = {}

    def of(self, node: NodeView) -> Conversation | None:
        """The conversation that `node` belongs to; None if it is not known to be held."""
        return self._of.get(node)

    def ending_at(self, node: NodeView) -> Conversation | None:
        """The conversation whose deepest held state `node` is, if any."""
        conversation = self._of.get(node)
        return conversation if conversation is not None and conversation.states[-1] is node else None

    def admitted(self, node: NodeView) -> Conversation | None:
        """Place a state; returns the conversation that it makes longer, None if it was held."""
        if node in self._of:
            return None
        before = node.state_above
        conversation = None if before is None else self.ending_at(before)
        if conversation is None:
            conversation = Conversation()
        self._of[node] = conversation
        conversation.states.append(node)
        conversation.num_tokens = node.depth
        return conversation

    def drop(self, node: NodeView) -> None:
        """The state of `node` was evicted."""
        conversation = self._of.pop(node)
        del conversation.states[bisect_left(conversation.states, node.depth, key=_depth)]
        conversation.ranked.pop(node, None)
