"""Which tokens keep their KV of layers that attend in a sliding window: the last ones before each state.

Such a layer reads the KV of the last `window_tokens` tokens alone, so a request that resumes from a state needs those
before it, and no others:

    ----------------xxxx S ----xxxx S'          x  held, for the state behind it
                         \\--xxxx S''

The windows of states below a node all reach through the end of its span, so what is held of a span is its end:

    gap(n)  = tokens from the end of n to the nearest state at or below it
    held(n) = max(window_tokens - gap(n), 0), at most the tokens of n

A state that comes or goes changes gaps on the way up, no further than a window. Nothing here hangs on where KV lies, so
a server counts without waiting for its device. Owner: `engine/windows/memory.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

from marconi.tree.node import Node


class Change(NamedTuple):
    """Another part of the span of a node is held."""

    node: Node
    num_before: int
    num_now: int
    """Tokens before its end."""


class Windows:
    """Tokens before the states of a tree, by node."""

    __slots__ = ("_gaps", "_is_state", "num_tokens", "window_tokens")

    def __init__(self, window_tokens: int, is_state: Callable[[Node], bool]) -> None:
        """`is_state` says whether a window before a node counts; `window_tokens` is a multiple of the tree's unit."""
        self.window_tokens = window_tokens
        self._is_state = is_state
        self.num_tokens = 0
        """Tokens that are held."""
        self._gaps: dict[Node, int] = {}
        """The gaps of nodes of which anything is held."""

    def num_held(self, node: Node) -> int:
        """Tokens before the end of the span of `node` that are held."""
        assert node.parent is not None
        return min(self.window_tokens - self._gaps.get(node, self.window_tokens), node.depth - node.parent.depth)

    def changed(self, node: Node) -> list[Change]:
        """A state at `node` has come or gone: count anew what is held of its path."""
        changes = list[Change]()
        while node.parent is not None:
            gap = self._gap(node)
            if gap == self._gaps.get(node, self.window_tokens):
                break
            before = self.num_held(node)
            if gap < self.window_tokens:
                self._gaps[node] = gap
            else:
                del self._gaps[node]
            now = self.num_held(node)
            self.num_tokens += now - before
            if now != before:
                changes.append(Change(node, before, now))
            node = node.parent
        return changes

    def split(self, upper: Node, lower: Node) -> None:
        """The span that was `lower`'s is now `upper`'s, followed by `lower`'s: as much of both is held."""
        gap = self._gap(upper)
        if gap < self.window_tokens:
            self._gaps[upper] = gap

    def joined(self, upper: Node, lower: Node) -> None:
        """The span of `lower` now begins with what was `upper`'s, and as much is held."""
        self._gaps.pop(upper, None)

    def _gap(self, node: Node) -> int:
        if self._is_state(node):
            return 0
        gaps, none = self._gaps, self.window_tokens
        return min([none, *(gaps.get(child, none) + child.depth - node.depth for child in node.live_children)])

    def check_invariants(self, nodes: list[Node]) -> None:
        """Raise `AssertionError` unless it holds exactly the windows before the states among the live `nodes`."""
        held = dict.fromkeys(nodes, 0)
        for node in nodes:
            left, above = self.window_tokens if self._is_state(node) else 0, node
            while left > 0 and above.parent is not None:
                num_tokens = above.depth - above.parent.depth
                held[above] = max(held[above], min(left, num_tokens))
                left -= num_tokens
                above = above.parent
        for node, num_held in held.items():
            assert self.num_held(node) == num_held, f"{node}: {self.num_held(node)} tokens in windows, not {num_held}"
        assert self._gaps.keys() <= held.keys(), "windows before states that are gone"
        assert self.num_tokens == sum(held.values()), "tokens in windows are miscounted"
