"""Indices of a pool, by the node whose span they hold the KV of.

They are kept in segments as they were handed over: joining two spans joins two lists, splitting one cuts a segment into
two views. A node may have fewer than its span has tokens, as long as its path is filled from the front.
"""

from collections.abc import Iterator

import torch

from marconi.tree import Node


class Segments:
    """Indices, int64, in order along each path."""

    __slots__ = ("_by_node", "_empty")

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._by_node: dict[Node, list[torch.Tensor]] = {}
        self._empty = torch.empty(0, dtype=torch.int64, device=device)

    def __contains__(self, node: Node) -> bool:
        return node in self._by_node

    def open(self, node: Node) -> None:
        """`node` has an entry from now on, and no indices yet."""
        self._by_node[node] = []

    def add(self, node: Node, indices: torch.Tensor) -> None:
        """The next tokens of the span of `node` lie at `indices`."""
        self._by_node.setdefault(node, []).append(indices)

    def pop(self, node: Node) -> list[torch.Tensor]:
        """Forget a node; returns what it had."""
        return self._by_node.pop(node, [])

    def num_tokens(self, node: Node) -> int:
        """Tokens of the span of `node` that have their indices."""
        return sum(map(len, self._by_node.get(node, ())))

    def split(self, upper: Node, lower: Node) -> None:
        """Cut what is `lower`'s where `upper` ends."""
        num_left = num_tokens(upper)
        above: list[torch.Tensor] = []
        below: list[torch.Tensor] = []
        for segment in self._by_node[lower]:
            cut = min(len(segment), num_left)
            num_left -= cut
            if cut:
                above.append(segment[:cut])
            if cut < len(segment):
                below.append(segment[cut:])
        self._by_node[upper], self._by_node[lower] = above, below

    def join(self, upper: Node, lower: Node) -> None:
        """Put what was `upper`'s in front of `lower`'s."""
        self._by_node[lower] = self._by_node.pop(upper) + self._by_node[lower]

    def along(self, node: Node, start: Node | None = None) -> torch.Tensor:
        """The indices of all tokens before the end of `node`, in order; of those after `start`, which is above it."""
        segments: list[torch.Tensor] = []
        for above in path_up(node):
            if above is start:
                break
            segments.extend(reversed(self._by_node[above]))
        segments.reverse()
        return torch.cat(segments) if segments else self._empty

    def all(self) -> torch.Tensor:
        """All indices, in no order."""
        segments = [segment for held in self._by_node.values() for segment in held]
        return torch.cat(segments) if segments else self._empty

    def nodes(self) -> set[Node]:
        """Those that have an entry."""
        return set(self._by_node)


def path_up(node: Node) -> Iterator[Node]:
    """The node and those above it, the root aside."""
    while node.parent is not None:
        yield node
        node = node.parent


def num_tokens(node: Node) -> int:
    """Tokens of a node's span."""
    assert node.parent is not None
    return node.depth - node.parent.depth
